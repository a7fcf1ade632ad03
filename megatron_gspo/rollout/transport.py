"""The two ways of weights into servers: broadcasts of flattened buckets, and an HF checkpoint on a shared disk."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_gspo.rollout.bucket import Bucket, check_coverage, describe, flatten
from megatron_gspo.rollout.control import Servers
from megatron_gspo.rollout.together import together
from megatron_gspo.rollout.update_group import UpdateGroup


class DistributedTransport[B: Bucket]:
    """Broadcasts buckets, the same sequence on every rank, each from its sender (a global rank) to all servers.

    `gather(bucket)` returns the bucket's (name, tensor) pairs on its sender and nothing elsewhere; it is a collective
    among the trainer ranks that hold parts of them.
    `expected` is what the model consists of, HF name to shape: ValueError unless the buckets are exactly that.
    `backend` is that of the broadcasts: gloo on CPU, nccl on CUDA. `group`: all trainer ranks, takes CPU tensors.
    """

    def __init__(
        self,
        servers: Servers,
        buckets: Sequence[B],
        gather: Callable[[B], Sequence[tuple[str, Tensor]]],
        *,
        expected: Mapping[str, Sequence[int]],
        backend: str,
        group: dist.ProcessGroup,
    ):
        check_coverage(buckets, expected)
        self._servers = servers
        self._buckets = buckets
        self._bodies = [describe(bucket) for bucket in buckets]
        self._gather = gather
        self._backend = backend
        self._group = group
        self._rank = dist.get_rank()
        self._update_group: UpdateGroup | None = None

    def connect(self) -> None:
        """One process group per sender, joined one after the other."""
        for sender in sorted({bucket.sender for bucket in self._buckets}):
            together(self._group, self._join if sender == self._rank else lambda: None)

    def begin(self, version: int) -> None:
        self._lead(self._servers.begin_update)

    def push(self, version: int) -> None:
        for number in range(len(self._buckets)):
            together(self._group, partial(self._send, number, version))
        self._lead(self._servers.end_update)

    def close(self) -> None:
        together(self._group, self._update_group.close if self._update_group else lambda: None)

    def _lead(self, action: Callable[[], None]) -> None:
        leads = dist.get_rank(self._group) == 0
        together(self._group, action if leads else lambda: None)

    def _join(self) -> None:
        # A fresh name: a server that outlives the trainer still has the group of the trainer before.
        name = f"megatron_gspo_{self._rank}_{uuid.uuid4().hex[:8]}"
        self._update_group = UpdateGroup(self._servers, name=name, backend=self._backend)

    def _send(self, number: int, version: int) -> None:
        bucket = self._buckets[number]
        tensors = self._gather(bucket)
        if bucket.sender != self._rank:
            return
        assert self._update_group is not None, "connect() before push()"
        body = self._bodies[number] | {"load_format": "flattened_bucket", "flush_cache": False}
        if number == len(self._buckets) - 1:  # on an earlier one, a failure would leave the new version on old weights
            body["weight_version"] = str(version)
        self._update_group.broadcast(flatten(bucket, tensors), body)


class DiskTransport:
    """Saves an HF checkpoint into `directory`, which trainer and servers share, has it loaded, and removes it.

    `save(path)` writes a complete checkpoint; collective over the trainer ranks, as everything here.
    """

    def __init__(self, servers: Servers, save: Callable[[Path], None], *, directory: Path, group: dist.ProcessGroup):
        self._servers = servers
        self._save = save
        self._directory = directory
        self._group = group

    def connect(self) -> None:
        """Nothing to connect."""

    def begin(self, version: int) -> None:
        path = self._path(version)
        together(self._group, lambda: self._clear(path))  # a run that was killed may have left it
        together(self._group, lambda: self._save(path))

    def push(self, version: int) -> None:
        together(self._group, lambda: self._load(self._path(version), version))

    def close(self) -> None:
        """Nothing to release."""

    def _path(self, version: int) -> Path:
        return self._directory / f"weights_{version}"

    def _load(self, path: Path, version: int) -> None:
        if dist.get_rank(self._group) != 0:
            return
        self._servers.load_from_disk(str(path.absolute()), version)
        shutil.rmtree(path)

    def _clear(self, path: Path) -> None:
        if dist.get_rank(self._group) == 0:
            shutil.rmtree(path, ignore_errors=True)
