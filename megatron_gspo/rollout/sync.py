"""Weight updates of the servers as transactions that all trainer ranks take part in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from megatron_gspo.rollout.control import Servers
from megatron_gspo.rollout.together import UpdateFailed, together


class Transport(Protocol):
    """How weights reach the servers. Every method is collective over the trainer ranks and raises the same on all."""

    def connect(self) -> None:
        """Prepare; once, before the first `push`."""

    def begin(self, version: int) -> None:
        """Whatever `push` needs and leaves the servers' weights as they are. The servers are paused."""

    def push(self, version: int) -> None:
        """Load the trainer's weights into the servers as `version`."""

    def close(self) -> None:
        """Release what `connect` took."""


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

        Raises UpdateFailed on every rank when anything failed on any rank or server; it says which weights the servers
        hold then. They stay paused, so that none serves a mixture of old and new weights.
        """
        urls = ", ".join(self._servers.urls)
        kept = f"no weights were sent, and {urls} keep those before, perhaps paused"
        self._phase(version, kept, lambda: self._begin(version))
        mixed = f"{urls} stay paused with a mixture of old and new weights"
        self._phase(version, mixed, lambda: self._transport.push(version))
        self._phase(version, f"{urls} hold the new weights, but perhaps stay paused", lambda: self._lead(self._finish))

    def close(self) -> None:
        """Disconnect; for servers that outlive the trainer."""
        self._transport.close()

    def _phase(self, version: int, consequence: str, action: Callable[[], None]) -> None:
        try:
            action()
        except UpdateFailed as error:
            raise UpdateFailed(
                f"weight update to version {version} failed; {consequence}: restart them. {error}"
            ) from error

    def _begin(self, version: int) -> None:
        self._lead(self._servers.pause)
        self._transport.begin(version)

    def _finish(self) -> None:
        self._servers.flush_cache()
        self._servers.resume()

    def _lead(self, action: Callable[[], None]) -> None:
        leads = dist.get_rank(self._group) == 0
        together(self._group, action if leads else lambda: None)
