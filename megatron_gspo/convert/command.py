"""What the tools share: one process or torchrun's ranks, no GPU, errors as one line, exit codes.

0: done. 1: the answer is no (checkpoints differ). 2: an error, which left nothing behind. Imports torch inside
functions, so that --help is quick.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

ERROR, INTERRUPTED = 2, 130


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the script's own docstring."""
    summary, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run(work: Callable[[], int], *, in_world: bool = True) -> int:
    """Runs `work`, inside the default process group or without one; returns its exit code, or that of what stopped
    it."""
    # Checkpoints are converted in main memory; with a GPU in sight, Megatron would build the model on it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _prepared(work, in_world)
    except (ValueError, OSError, RuntimeError, AssertionError) as error:  # Megatron refuses a layout by assertion
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or not isinstance(error, RuntimeError):  # RuntimeErrors are agreed on: one rank says them
            print(f"\nerror{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED


def _prepared(work: Callable[[], int], in_world: bool) -> int:
    import logging
    import warnings

    logging.disable(logging.WARNING)  # before torch is imported: it warns of the missing GPU
    warnings.filterwarnings("ignore", module=r"megatron|torch")
    from megatron_gspo.policy import cpu

    cpu.install()
    from megatron_gspo.convert.world import world

    with world() if in_world else nullcontext():
        return work()


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
