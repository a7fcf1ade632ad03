"""The signals that ask a run to stop. Imports no torch: the launcher listens too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def listen(on_signal: Callable[[int, FrameType | None], None]) -> None:
    """Have the stop signals of this process call `on_signal`, but those that it was started to ignore: nohup does so
    with SIGHUP.

    After SIGHUP the terminal takes no more output, and a line to it would end the run before it has saved: what this
    process says there goes nowhere from then on.
    """
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence(terminals)
        on_signal(number, frame)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def _silence(descriptors: list[int]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
