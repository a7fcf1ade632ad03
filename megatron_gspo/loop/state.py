"""Checkpoints of a run: the state of its trained models and its position, on disk whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

_STATE, _SCORES = "run_state.json", "scores.safetensors"
_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands. `mini_batch` > 0 means that the step was left after that many optimizer steps."""

    step: int
    weight_version: int
    mini_batch: int = 0
    record: str | None = None  # the rollout record of a step that was left half-way


def checkpoint_dir(run_dir: Path, state: RunState) -> Path:
    """Folder of the checkpoint at `state`; its name sorts in training order."""
    return run_dir / "checkpoints" / f"step_{state.step:06d}_{state.mini_batch:03d}"


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
    """
    target = checkpoint_dir(run_dir, state)
    partial = target.with_name(target.name + _PARTIAL)
    first = dist.get_rank(group) == 0
    if first:
        for left in target.parent.glob(f"*{_PARTIAL}"):  # by a run that was killed while saving
            shutil.rmtree(left)
        for name in models:
            (partial / name).mkdir(parents=True)
    dist.barrier(group)
    for name, save in models.items():
        save(partial / name)
    if first:
        if scores:
            save_file(dict(scores), partial / _SCORES)
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
    dist.barrier(group)
    if first:
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        for old in whole_checkpoints(run_dir)[: -keep or None] if keep else []:
            shutil.rmtree(old)
    dist.barrier(group)
    return target


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in found if not path.name.endswith(_PARTIAL))


def load_newest(run_dir: Path, models: Mapping[str, Callable[[Path], None]]) -> tuple[RunState, dict[str, Tensor]]:
    """Restore the newest whole checkpoint of `run_dir`; returns its state and scores. Collective.

    models: name -> a collective that reads what was saved under that name. Raises ValueError where there is no
    checkpoint.
    """
    whole = whole_checkpoints(run_dir)
    if not whole:
        raise ValueError(
            f"--resume: {run_dir / 'checkpoints'} holds no whole checkpoint; start the run without --resume in a new "
            "run.dir, and set run.save_every to have checkpoints"
        )
    newest = whole[-1]
    for name, load in models.items():
        load(newest / name)
    state = RunState(**json.loads((newest / _STATE).read_text()))
    path = newest / _SCORES
    return state, load_file(path) if path.exists() else {}


def is_saved(run_dir: Path, state: RunState) -> bool:
    """Whether the checkpoint at `state` is on disk already."""
    return checkpoint_dir(run_dir, state).exists()
