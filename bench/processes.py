"""Runs a command and watches the peak memory of each of its processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil

POLL_S = 0.5


def run_watched(command: list[str], log: Path, threads: int = 1) -> dict[str, float]:
    """Run `command` with its output in `log`; returns peak resident memory in GB by process name, largest of a name.

    Names are those of `process_name`. `threads` is what OpenMP gets unless the command says otherwise. Raises
    RuntimeError with the end of the log when the command fails.
    """
    peaks: dict[str, float] = {}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.getcwd()},
        )
        try:
            while process.poll() is None:
                _note_peaks(process.pid, peaks)
                time.sleep(POLL_S)
        finally:
            process.terminate()  # interrupted: a run stops its own processes
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({process.returncode}); the end of {log}:\n{_tail(log)}")
    return peaks


def process_name(command_line: list[str]) -> str:
    """The module after -m, the title that a process gave itself, or the program's name."""
    if "-m" in command_line[:-1]:
        return command_line[command_line.index("-m") + 1]
    if any("multiprocessing" in word for word in command_line):
        return "multiprocessing"
    return Path(command_line[0]).name


def _note_peaks(pid: int, peaks: dict[str, float]) -> None:
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            command_line, peak = member.cmdline(), _peak_gb(member.pid)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if command_line:  # of a zombie it is empty
            name = process_name(command_line)
            peaks[name] = max(peaks.get(name, 0.0), peak)


def _peak_gb(pid: int) -> float:
    """The kernel's high-water mark, so that polling misses nothing but a process's last moments."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
    return kilobytes * 1024 / 1e9


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
