"""SIGTERM, SIGUSR1, SIGINT and SIGHUP ask a run to stop: finish the step, save, exit. A second SIGINT stops at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from megatron_gspo.loop.stop_signals import listen


class StopRequest:
    """Remembers when this rank was asked to stop; ranks agree on it by a collective, since signals arrive unevenly."""

    def __init__(self, group: dist.ProcessGroup, grace_s: float):
        self._group = group
        self._grace_s = grace_s
        self._asked_at: float | None = None

    def install(self) -> None:
        """Handle the signals in this process."""
        listen(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    @property
    def expired(self) -> bool:
        """This rank was asked to stop longer ago than the grace period."""
        return self._asked_at is not None and time.monotonic() - self._asked_at > self._grace_s

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective: every rank calls it at the same point."""
        return self._any(self._asked_at is not None)

    def agreed_expired(self) -> bool:
        """Whether the grace period is over on any rank. Collective: every rank calls it at the same point."""
        return self._any(self.expired)

    def _any(self, mine: bool) -> bool:
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())
