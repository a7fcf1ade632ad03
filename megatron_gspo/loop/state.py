"""Checkpoints of a run: the policy's state and the run's position, on disk whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

_STATE, _POLICY, _OLD_LOGP = "run_state.json", "policy", "old_logp.safetensors"
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
    save_policy: Callable[[Path], None],
    old_logp: Tensor | None,
    *,
    keep: int,
    group: dist.ProcessGroup,
) -> Path:
    """Write a checkpoint into a temporary sibling and rename it when all ranks are done. Collective.

    `old_logp` [total tokens of the batch] fp32 belongs to a step left half-way and is the same on every rank.
    The newest `keep` checkpoints stay (0 keeps all); older ones go only after the new one is in place.
    """
    target = checkpoint_dir(run_dir, state)
    partial = target.with_name(target.name + _PARTIAL)
    first = dist.get_rank(group) == 0
    if first:
        for left in target.parent.glob(f"*{_PARTIAL}"):  # by a run that was killed while saving
            shutil.rmtree(left)
        (partial / _POLICY).mkdir(parents=True)
    dist.barrier(group)
    save_policy(partial / _POLICY)
    if first:
        if old_logp is not None:
            save_file({"old_logp": old_logp}, partial / _OLD_LOGP)
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


def load_newest(run_dir: Path, load_policy: Callable[[Path], None]) -> tuple[RunState, Tensor | None]:
    """Restore the newest whole checkpoint of `run_dir`. Collective.

    Raises ValueError when there is none.
    """
    whole = whole_checkpoints(run_dir)
    if not whole:
        raise ValueError(
            f"--resume: {run_dir / 'checkpoints'} holds no whole checkpoint; start the run without --resume in a new "
            "run.dir, and set run.save_every to have checkpoints"
        )
    newest = whole[-1]
    load_policy(newest / _POLICY)
    state = RunState(**json.loads((newest / _STATE).read_text()))
    path = newest / _OLD_LOGP
    return state, load_file(path)["old_logp"] if path.exists() else None


def is_saved(run_dir: Path, state: RunState) -> bool:
    """Whether the checkpoint at `state` is on disk already."""
    return checkpoint_dir(run_dir, state).exists()
