"""One process, or the ranks that torchrun started: sharing work out, and saying how far it is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

AHEAD_BYTES = 64 * 2**20


@contextmanager
def world() -> Iterator[None]:
    """The default process group: gloo over torchrun's ranks, or this process alone."""
    if dist.is_initialized():  # a caller's own
        yield
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
        dist.barrier()  # torchrun ends all ranks when the first leaves with a code other than 0
    finally:
        dist.destroy_process_group()


def shares(sizes: Sequence[int]) -> list[int]:
    """A rank for every piece of work: each goes, in order, to the one with the fewest bytes so far."""
    load = [0] * dist.get_world_size()
    ranks = []
    for size in sizes:
        rank = load.index(min(load))
        load[rank] += size
        ranks.append(rank)
    return ranks


def ahead[T](work: Sequence[T], prefetch: Callable[[T], int], ahead_bytes: int = AHEAD_BYTES) -> Iterator[T]:
    """Yields `work` in order, and has the disk read on meanwhile: `prefetch` asks it for a piece and returns its bytes,
    `ahead_bytes` before its turn."""
    sizes: list[int] = []
    asked = done = 0
    for number, piece in enumerate(work):
        while len(sizes) < len(work) and (asked - done < ahead_bytes or len(sizes) <= number):
            sizes.append(prefetch(work[len(sizes)]))
            asked += sizes[-1]
        yield piece
        done += sizes[number]


class Progress:
    """One line on stderr of how many bytes this rank has done of how many; silent on other ranks than the first."""

    def __init__(self, what: str, total_bytes: int, every_s: float = 0.5):
        self._what, self._total, self._every_s = what, total_bytes, every_s
        self._start = self._last = time.monotonic()
        self._done = 0
        self._shown = dist.get_rank() == 0

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        now = time.monotonic()
        if self._shown and (now - self._last > self._every_s or self._done == self._total):
            self._last = now
            rate = self._done / max(now - self._start, 1e-9) / 1e9
            share = self._done / self._total if self._total else 1.0
            end = "\n" if self._done == self._total else ""
            line = f"\r{self._what}: {share:4.0%} of {self._total / 1e9:.2f} GB at {rate:.2f} GB/s"
            print(line, end=end, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line on stdout, from the first rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)
