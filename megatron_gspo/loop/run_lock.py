"""One run at a time in a run folder: a lock that is held as long as any process of the run lives.

The launcher takes `run.lock` alone, then shares it with its ranks and their sampling process. Whoever wants it alone
must wait for all of them, also for those that outlive a launcher that was killed. The kernel releases it with the last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from datetime import datetime
from pathlib import Path

LOCK_FILE = "run.lock"
CLAIM_S = 2.0  # a claim has the lock alone for an instant only, in which a rank of the same run may come
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class RunDirInUse(RuntimeError):
    """Another run holds the folder; the message says which."""


def claim(run_dir: Path) -> int:
    """Create `run_dir` where it is missing and lock it against other runs; returns the descriptor that holds the lock.

    Raises RunDirInUse while any process of another run holds it, and OSError for a folder that cannot be made or
    written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(lock, fcntl.LOCK_EX, run_dir)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(owner).encode(), 0)
        _lock(lock, fcntl.LOCK_SH, run_dir)
    except BaseException:
        os.close(lock)
        raise
    return lock


def share(run_dir: Path, patience_s: float = 0.0) -> None:
    """Hold the lock that this run's launcher has claimed too, until this process and its forks end.

    Raises FileNotFoundError where nothing is to be seen of it for `patience_s`, and RunDirInUse while another run
    claims the folder, whose launcher is gone. (One that has claimed it already is not noticed: ranks end with their
    launcher.)
    """
    deadline = time.monotonic() + patience_s
    while not (run_dir / LOCK_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    lock = os.open(run_dir / LOCK_FILE, os.O_RDWR)
    claimed_by = time.monotonic() + CLAIM_S
    while True:
        try:
            return _lock(lock, fcntl.LOCK_SH, run_dir)
        except RunDirInUse:
            if time.monotonic() > claimed_by:
                raise
            time.sleep(0.05)


def _lock(lock: int, kind: int, run_dir: Path) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirInUse(f"in use by {_owner(lock)}") from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        print(f"[train] {run_dir} cannot be locked ({error.strerror}): see that no other run uses it", file=sys.stderr)


def _owner(lock: int) -> str:
    try:
        owner = json.loads(os.pread(lock, 4096, 0))
    except ValueError:  # it has the lock, and is about to say who it is
        return "another run"
    return f"the run of pid {owner['pid']} on {owner['host']} since {owner['since']}, or by ranks that it left"
