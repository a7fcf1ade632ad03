"""One trainer rank in a fresh process, on the GPU or on the CPU path.

The pytest process itself never computes on the GPU: every check starts from a clean device and leaves it clean, and the
CPU path, which is chosen before Megatron is imported, can run beside it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

# Transformer Engine multiplies fp32 matrices in TF32 whatever torch's flags say; the variable overrides every library.
GPU = {"NVIDIA_TF32_OVERRIDE": "0"}
CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def in_process[T](fn: Callable[..., T], *args: Any, environment: dict[str, str], timeout_s: float = 600.0) -> T:
    """`fn(*args)` in a new Python with `environment` on top of ours. Raises AssertionError with its traceback when it
    fails, or when it has not answered after `timeout_s`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    # As bytes: unpickling imports the test's modules, hence Megatron, which must come after `_main` has begun.
    process = context.Process(target=_main, args=(theirs, pickle.dumps((fn, args))))
    with mock.patch.dict(os.environ, environment):
        process.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), f"{fn.__name__} did not answer within {timeout_s:g} s"
        ok, answer = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        raise AssertionError(f"{fn.__name__} ended without an answer, exit code {process.exitcode}") from None
    finally:
        process.join(10.0)  # as it ends by itself, it ends its own children: Megatron keeps one that writes checkpoints
        process.kill()
        process.join()
    assert ok, f"{fn.__name__} failed:\n{answer}"
    return answer


def _main(pipe: Connection, call: bytes) -> None:
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "unset"):
        # Megatron uses Transformer Engine's CUDA kernels wherever it can be imported, CUDA device or not.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        fn, args = pickle.loads(call)
        answer = (True, fn(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # as bytes: torch would send a tensor as a handle that ends with this process


@contextmanager
def one_rank() -> Iterator[Any]:
    """A world of one rank around the block; gives the rank's device."""
    import torch
    import torch.distributed as dist

    from megatron_gspo.policy.cpu import on_gpu

    device = torch.device("cuda", 0) if on_gpu() else torch.device("cpu")
    if on_gpu():
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()
