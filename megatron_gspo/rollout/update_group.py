"""The process group over which one trainer rank, rank 0 of it, broadcasts weights to all server ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from megatron_gspo.rollout.control import ServerError, Servers


class UpdateGroup:
    """Built by the sender alone: the other trainer ranks are not in it. `backend` is gloo on CPU, nccl on CUDA."""

    def __init__(self, servers: Servers, *, name: str, backend: str):
        self._servers = servers
        self._name = name
        timeout = timedelta(seconds=servers.timeout_s)
        addresses = [_own_address(url) for url in servers.urls]
        sizes = servers.tensor_parallel_sizes()
        world_size = 1 + sum(sizes)
        store = dist.TCPStore(addresses[0], 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        bodies = [
            {
                "master_address": addresses[i],
                "master_port": store.port,
                "rank_offset": 1 + sum(sizes[:i]),
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            }
            for i in range(len(sizes))
        ]
        # torch offers no public way to a group with ranks of another world; this is what SGLang's side does
        # (`init_custom_process_group`), and both must agree on the prefixes in the store.
        build = partial(
            _new_process_group_helper,
            world_size,
            0,
            [],
            Backend(backend),
            dist.PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout,
        )
        group, _ = _both(build, partial(servers.init_group, bodies))
        assert isinstance(group, dist.ProcessGroup)
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self._group = group
        self._store = store  # it serves the group for as long as that lives

    def broadcast(self, payload: Tensor, body: dict[str, Any]) -> None:
        """Send `payload` to all servers, which receive and load it as `body` describes. Raises ServerError; the group
        is of no use then."""
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self._servers.receive_bucket, body | {"group_name": self._name})
            work = self._group.broadcast(payload, 0)
            try:
                received.result()
            except ServerError:
                self._group.abort()  # a server that refused never takes its part of the broadcast
                raise
            work.wait()

    def close(self) -> None:
        """Leave the group, servers and sender."""
        self._servers.destroy_group(self._name)
        dist.destroy_process_group(self._group)


def _both[T](build: Callable[[], T], join: Callable[[], None]) -> T:
    """What `build` returns, which waits until `join`, at the same time, has brought the others. Raises as soon as
    either fails: whoever would still be waiting for the other is left to its time limit."""
    with_others = ThreadPoolExecutor(2)
    built, joined = with_others.submit(build), with_others.submit(join)
    with_others.shutdown(wait=False)
    both: tuple[Future[Any], ...] = (joined, built)
    for future in wait(both, return_when=FIRST_EXCEPTION).done:
        future.result()
    return built.result()


def _own_address(url: str) -> str:
    """The address of this machine that the server at `url` can reach."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # datagram: picks a route, sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise ServerError(f"{url} cannot be reached from here: {error}") from error
