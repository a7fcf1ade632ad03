"""Real gloo ranks for tests: Megatron is imported once, then every rank is a fork: eight are up in a second."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.policy import cpu

cpu.install()

import megatron.core.models.gpt  # noqa: E402, F401  (the forks inherit it)


def _rank_main(rank: int, size: int, rendezvous: str, timeout_s: float, pipe: Connection, fn: Callable, args: tuple):
    # A rank that fails must not wait for peers in a collective: it reports and leaves at once.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(*args)
        dist.barrier()
        dist.destroy_process_group()
        answer = (True, result)
        code = 0
    except BaseException:
        answer, code = (False, traceback.format_exc()), 1
    # As bytes: torch would send a tensor as a handle that is gone with this process.
    pipe.send_bytes(pickle.dumps(answer))
    if code:
        os._exit(code)


def run_ranks(size: int, fn: Callable, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn(*args)` on `size` gloo ranks and return its results in rank order.

    Raises AssertionError with the rank's own traceback as soon as one rank fails, and after `timeout_s` if one hangs.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, size, rendezvous, timeout_s, theirs, fn, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = _collect(pipes, timeout_s)
            for process in processes:
                process.join(timeout_s)
            return results
        finally:
            for process in processes:
                process.kill()  # done, or waiting for a rank that failed
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, deadline - time.monotonic())
        assert ready, f"ranks {sorted(set(range(len(pipes))) - set(results))} did not answer within {timeout_s} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(pipes)} died without a word") from None
            assert ok, f"rank {rank} of {len(pipes)} failed:\n{payload}"
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]
