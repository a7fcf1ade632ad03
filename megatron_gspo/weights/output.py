"""Folders that several ranks write together and that appear whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

LOCK = ".lock"  # in an unfinished folder: held while somebody writes there


def attempt(step: Callable[[], None]) -> str | None:
    """Runs a step that may fail on this rank alone; the others must hear of it rather than wait for it."""
    try:
        step()
    except Exception as error:
        return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return None


def agree(error: str | None, what: str) -> None:
    """Every rank raises RuntimeError if one has an error: "`what` failed on ...". Collective over the world."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        raise RuntimeError(f"{what} failed on " + "; ".join(e for e in errors if e is not None))


@contextmanager
def whole_folder(target: Path, size_bytes: int, what: str) -> Iterator[Path]:
    """Yields a folder beside `target` to write into; renames it to `target` when the block ends well, removes it when
    not. Collective over the world; the ranks share the file system. What an earlier attempt left is replaced.

    Raises RuntimeError on every rank where `target` exists and is not empty, where another process writes it, where the
    disk has less room than `size_bytes`, and where the rename fails. The block sees to its own errors with `attempt`
    and `agree`.
    """
    target = Path(os.path.realpath(target))  # of a link, what it names: a folder cannot be renamed onto a link
    unfinished, first = target.with_name(f".{target.name}.unfinished"), dist.get_rank() == 0
    locks: list[int] = []
    try:
        agree(attempt(lambda: _prepare(target, unfinished, size_bytes, locks)) if first else None, what)
        agree(
            None
            if unfinished.is_dir()
            else f"rank {dist.get_rank()}: {unfinished} is not there; do all ranks share its file system?",
            what,
        )
        yield unfinished
        agree(attempt(lambda: _publish(unfinished, target)) if first else None, what)
    finally:
        for lock in locks:
            shutil.rmtree(unfinished, ignore_errors=True)
            os.close(lock)


def _prepare(target: Path, unfinished: Path, size_bytes: int, locks: list[int]) -> None:
    """Makes the folder, empty, and appends its lock, which no other process has, to `locks`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is not an empty directory; remove it or write elsewhere")
    unfinished.mkdir(parents=True, exist_ok=True)
    lock = os.open(unfinished / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = not (unfinished / LOCK).exists() or os.fstat(lock).st_ino != os.stat(unfinished / LOCK).st_ino
    except BlockingIOError:
        gone = True
    if gone:
        os.close(lock)
        raise FileExistsError(f"another process writes {target}, in {unfinished}; wait for it or write elsewhere")
    locks.append(lock)
    for path in unfinished.iterdir():  # of an attempt that was killed
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    free = shutil.disk_usage(unfinished).free
    if free < size_bytes:
        raise OSError(f"{target} needs {size_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on its disk")


def _publish(unfinished: Path, target: Path) -> None:
    (unfinished / LOCK).unlink()
    fsync(unfinished)
    os.replace(unfinished, target)
    fsync(target.parent)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    fsync(path)


def copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    fsync(target)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
