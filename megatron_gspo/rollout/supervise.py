"""Run a command and leave nothing of it behind: `python -m megatron_gspo.rollout.supervise PARENT GRACE_S COMMAND...`.

An SGLang server is a tree of processes, of which some may survive a crash of their root, or of whoever started it,
for a minute or forever. This small process stands between: it starts the command in a session of its own and kills
what is left of that session when the command ends, when its own parent dies (even by SIGKILL), or GRACE_S after
SIGTERM, which it passes on. Should it be killed itself, the kernel kills the command, whose other processes (those of
SGLang at least) end with their root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(parent_pid: int, grace_s: float, command: list[str]) -> int:
    """Supervise `command`; returns its exit code (128 + n if signal n ended it)."""
    deadline = float("inf")

    def ask_to_stop(*_: object) -> None:
        nonlocal deadline
        deadline = time.monotonic() + grace_s

    signal.signal(signal.SIGTERM, ask_to_stop)
    # Ignored here and, by inheritance, in the command: Slurm sends SIGUSR1 to every process of a step, and the server
    # must serve on while the trainer finishes its step.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    child = subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    terminated = False
    try:
        while child.poll() is None and os.getppid() == parent_pid and time.monotonic() < deadline:
            if deadline < float("inf") and not terminated:
                child.terminate()
                terminated = True
            time.sleep(POLL_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
