"""The trainer ranks that `train` starts on this machine: one process each, watched until the last has ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from megatron_gspo.loop.checkpoints import describe_room, is_full, partial_checkpoints
from megatron_gspo.loop.environment import Environment
from megatron_gspo.loop.stop_signals import listen

LAST_WORDS = 30  # lines of a failed rank's log that are shown
ECHO_S = 1.0  # within which the ranks that wait for a failed one fail too: the lowest may know the cause


def run_workers(recipe_path: Path, run_dir: Path, *, resume: bool, workers: int, threads: int) -> int:
    """Run `workers` ranks of the recipe at `recipe_path` to their end; returns the exit code of the run."""
    (run_dir / "logs").mkdir(exist_ok=True)
    port = _free_port()
    # Nothing is written to the pipe. Its end tells the ranks that this process is gone, even by SIGKILL.
    theirs, ours = os.pipe()
    command = [sys.executable, "-m", "megatron_gspo.loop", str(recipe_path), "--launcher", str(theirs)]
    command += ["--resume"] if resume else []
    started: list[subprocess.Popen] = []
    logs = [run_dir / "logs" / f"rank_{rank}.log" for rank in range(workers)]
    try:
        for rank, log in enumerate(logs):
            place = Environment(
                rank=rank, world_size=workers, local_rank=rank, master_addr="127.0.0.1", master_port=port
            )
            started.append(_start(command, place, log, threads, theirs))
        return _watch(started, logs)
    finally:
        _end(started)
        os.close(theirs)
        os.close(ours)
        for left in partial_checkpoints(run_dir):  # by ranks that failed while saving, perhaps for want of space
            shutil.rmtree(left)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: list[str], place: Environment, log: Path, threads: int, lifeline: int) -> subprocess.Popen:
    variables = os.environ | {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "OMP_NUM_THREADS": str(threads),
    }
    # Rank 0 speaks to the terminal; its errors and every other rank's words go to a log. Each worker has a session of
    # its own, so that Ctrl-C reaches the launcher alone, which forwards it once.
    with log.open("a") as sink:
        return subprocess.Popen(
            command,
            env=variables,
            stdout=None if place.rank == 0 else sink,
            stderr=sink,
            start_new_session=True,
            pass_fds=[lifeline],
        )


def _watch(workers: list[subprocess.Popen], logs: list[Path]) -> int:
    """Wait for all workers; forward signals to them; when one fails, show its last words. The others may still run."""
    asked: list[int] = []

    def forward(number, frame):
        asked.append(number)
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    listen(forward)
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            time.sleep(ECHO_S)
            failed = {rank: code for rank, worker in enumerate(workers) if (code := worker.poll())}
            if all(-code in asked for code in failed.values()):  # a rank that trains answers a signal otherwise
                print("[train] stopped while starting: nothing was trained", flush=True)
                return 0
            for rank in list(failed)[:2]:
                print(f"[train] rank {rank} {_how(failed[rank])}; see {logs[rank]}:")
                with logs[rank].open(errors="replace") as log:  # compiled code may print anything
                    print("".join(deque(log, LAST_WORDS)), flush=True)
            if is_full(logs[0].parent):  # the last words may not have found room either
                print(
                    f"[train] {describe_room(logs[0].parents[1])}: make room, then continue with --resume", flush=True
                )
            return max(1, *failed.values())
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _how(code: int) -> str:
    """What the exit code of a failed rank says."""
    if code > 0:
        return f"failed with exit code {code}"
    cause = " (by the system, where memory ran out: see `dmesg`)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{cause}"


def _end(workers: list[subprocess.Popen], patience_s: float = 10.0) -> None:
    # Whole sessions: a rank that fails leaves the sampling process and Megatron's checkpoint writer behind.
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + patience_s
    for worker in workers:
        worker.wait(timeout=max(0.1, deadline - time.monotonic()))
