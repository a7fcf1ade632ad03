"""Checkpoints of a run: the state of its trained models and its position, on disk whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gspo.loop.checkpoints import (
    PARTIAL,
    STATE_FILE,
    RunState,
    checkpoint_dir,
    describe_room,
    flush,
    partial_checkpoints,
    read_state,
    remove,
    whole_checkpoints,
)

_SCORES = "scores.safetensors"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; the message names it."""


def save_checkpoint(
    run_dir: Path,
    state: RunState,
    models: Mapping[str, Callable[[Path], None]],
    scores: Mapping[str, Tensor],
    *,
    keep: int,
    group: dist.ProcessGroup,
) -> Path:
    """Write a checkpoint into a temporary sibling and rename it when all ranks are done. Collective.

    models: name of a trained model -> a collective that writes it into a folder of that name. scores: [total tokens of
    the batch] fp32 each, the same on every rank, of a step left half-way: what was known of its tokens before the
    first update, and could not be computed again after it.
    The newest `keep` checkpoints stay (0 keeps all); older ones go only after the new one is in place.
    Raises CheckpointFailed on a rank that cannot write; what it leaves is no checkpoint.
    """
    target = checkpoint_dir(run_dir, state)
    partial = target.with_name(target.name + PARTIAL)
    first = dist.get_rank(group) == 0
    with _named(f"saving {target} failed", lambda: f"{describe_room(run_dir)}; the checkpoints before it are whole"):
        if first:
            for left in partial_checkpoints(run_dir):  # by a run that was killed while saving
                shutil.rmtree(left)
            for name in models:
                (partial / name).mkdir(parents=True)
        dist.barrier(group)
        for name, save in models.items():
            save(partial / name)
        if first:
            if scores:
                save_file(dict(scores), partial / _SCORES)
            (partial / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        dist.barrier(group)
    if first:
        flush(partial)
        partial.rename(target)
        for old in whole_checkpoints(run_dir)[:-keep] if keep else []:
            remove(old)
    dist.barrier(group)
    return target


def agreed_checkpoints(run_dir: Path, group: dist.ProcessGroup) -> list[Path]:
    """The whole checkpoints, oldest first, as rank 0 sees them: another node may remember of a network file system what
    it was. Collective."""
    box = [whole_checkpoints(run_dir) if dist.get_rank(group) == 0 else []]
    dist.broadcast_object_list(box, 0, group=group)
    return box[0]


def load_newest(
    whole: Sequence[Path], models: Mapping[str, Callable[[Path], None]]
) -> tuple[RunState, dict[str, Tensor]]:
    """Restore the last of the checkpoints `whole`, of which there is at least one; returns its state and scores.
    Collective.

    models: name -> a collective that reads what was saved under that name. Raises ValueError where the checkpoint is of
    another layout, and CheckpointFailed where it is damaged.
    """
    newest = whole[-1]
    state, path = read_state(newest), newest / _SCORES
    remedy = f"it is damaged, or this run is not its own; remove it to go on from {_before(whole)}"
    with _named(f"the checkpoint {newest} cannot be read", lambda: remedy):
        for name, load in models.items():
            load(newest / name)
        return state, load_file(path) if path.exists() else {}


def is_saved(run_dir: Path, state: RunState, group: dist.ProcessGroup) -> bool:
    """Whether the checkpoint at `state` is on disk already. Collective."""
    return checkpoint_dir(run_dir, state) in agreed_checkpoints(run_dir, group)


def _before(whole: Sequence[Path]) -> str:
    return f"the one before, {whole[-2].name}" if len(whole) > 1 else "the beginning, as there is none before it"


@contextmanager
def _named(failure: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Whatever the file formats below raise says which checkpoint it was. A ValueError of ours says so already."""
    try:
        yield
    except ValueError:
        raise
    except CheckpointException as error:  # no Exception, and its text is a traceback for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointFailed(f"{failure}: rank {rank}: {type(cause).__name__}: {cause}; {remedy()}") from error
    except Exception as error:
        raise CheckpointFailed(f"{failure}: {type(error).__name__}: {error}; {remedy()}") from error
