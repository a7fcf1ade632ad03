"""Ranks end when their launcher does, however it ended: they watch a pipe whose other end only the launcher holds."""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_launcher(pipe: int) -> None:
    """End this process and its whole group once the other end of `pipe` closes. The process must lead its group."""
    assert os.getpgrp() == os.getpid(), "a rank is started in a session of its own"
    threading.Thread(target=_watch, args=(pipe,), name="lifeline", daemon=True).start()


def _watch(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns when the launcher is gone
    print("[train] the launcher is gone, so this rank ends", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
