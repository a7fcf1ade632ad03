"""Weight updates of the servers as transactions that all trainer ranks take part in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_gspo.rollout.control import Servers


class UpdateFailed(RuntimeError):
    """A weight update failed on some rank or server; raised on every rank, with the messages of those that failed."""


class Transport(Protocol):
    """How weights reach the servers. Every method is collective over the trainer ranks and raises the same on all."""

    def connect(self) -> None:
        """Prepare; once, before the first `push`."""

    def push(self, version: int) -> None:
        """Load the trainer's weights into the paused servers as `version`."""

    def close(self) -> None:
        """Release what `connect` took."""


def together[T](group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on every rank of `group` (CPU tensors) and return its result; when it raises on one rank, raise
    UpdateFailed on all of them. Collective."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    failed = torch.tensor([error is not None], dtype=torch.int32)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return result
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}", group=group)
    raise UpdateFailed(
        "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message)
    ) from error


class WeightSync:
    """Pushes the trainer's weights into all servers. Every method is collective over `group`, a group of all trainer
    ranks that takes CPU tensors; its rank 0 speaks to the servers."""

    def __init__(self, servers: Servers, transport: Transport, group: dist.ProcessGroup):
        self._servers = servers
        self._transport = transport
        self._group = group

    def connect(self) -> None:
        """Connect trainer and servers. Raises UpdateFailed."""
        self._transport.connect()

    def update(self, version: int) -> None:
        """Make all servers hold the trainer's weights as `version`. Requests in flight wait and go on with the new
        weights; their tokens keep the version that sampled them.

        Raises UpdateFailed on every rank when anything failed on any rank or server. The servers then stay paused, so
        that none serves a mixture of old and new weights.
        """
        try:
            self._lead(self._servers.pause)
            self._transport.push(version)
            self._lead(self._finish)
        except UpdateFailed as error:
            raise UpdateFailed(
                f"weight update to version {version} failed; {', '.join(self._servers.urls)} stay paused with a "
                f"mixture of old and new weights: restart them. {error}"
            ) from error

    def close(self) -> None:
        """Disconnect; for servers that outlive the trainer."""
        self._transport.close()

    def _finish(self) -> None:
        self._servers.flush_cache()
        self._servers.resume()

    def _lead(self, action: Callable[[], None]) -> None:
        leads = dist.get_rank(self._group) == 0
        together(self._group, action if leads else lambda: None)
