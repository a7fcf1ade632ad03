"""Where a run stands, as the folders in its run.dir tell. Imports no torch: `train` looks before it starts anything."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

STATE_FILE = "run_state.json"
PARTIAL = ".partial"
_NAME = re.compile(r"step_\d{6,}_\d{3,}")
EXPORT_DIR = "hf"
FULL_BYTES = 2**24  # what could not be written was larger than what is left


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands. `mini_batch` > 0 means that the step was left after that many optimizer steps."""

    step: int
    weight_version: int
    mini_batch: int = 0
    record: str | None = None  # the rollout record of a step that was left half-way


def checkpoint_dir(run_dir: Path, state: RunState) -> Path:
    """Folder of the checkpoint at `state`."""
    return run_dir / "checkpoints" / f"step_{state.step:06d}_{state.mini_batch:03d}"


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first. Whatever else lies beside them, such as copies, is the user's own."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: [int(number) for number in path.name.split("_")[1:]])


def partial_checkpoints(run_dir: Path) -> list[Path]:
    """What was being written when a run ended."""
    return sorted((run_dir / "checkpoints").glob(f"*{PARTIAL}"))


def read_state(checkpoint: Path) -> RunState:
    """The position that `checkpoint` was written at. Raises ValueError naming it where it does not say one."""
    path = checkpoint / STATE_FILE
    try:
        return RunState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}), so the checkpoint is not whole; remove "
            f"{checkpoint} to go on from the one before, or from the beginning where there is none"
        ) from error


def newest_state(run_dir: Path) -> RunState | None:
    """The position of the newest whole checkpoint, None where there is none. Raises ValueError for a damaged one."""
    whole = whole_checkpoints(run_dir)
    return read_state(whole[-1]) if whole else None


def exported_state(run_dir: Path) -> RunState | None:
    """The position at which the HF export was made, None where there is none or it does not say: the export is then
    made again."""
    try:
        return read_state(run_dir / EXPORT_DIR)
    except ValueError:
        return None


def flush(folder: Path) -> None:
    """Have the content of `folder` survive a crash of the machine, before its name says that it is whole."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint that, half removed, must not look whole."""
    partial = checkpoint.with_name(checkpoint.name + PARTIAL)
    checkpoint.rename(partial)
    shutil.rmtree(partial)


def is_full(folder: Path) -> bool:
    """Whether the disk of `folder` has no room for what a run writes."""
    return shutil.disk_usage(folder).free < FULL_BYTES


def describe_room(folder: Path) -> str:
    """How much room is left; Megatron's writer says that it failed, but not that the disk is full."""
    free = shutil.disk_usage(folder).free
    return f"No space left on the disk of {folder}" if is_full(folder) else f"{free / 1e9:.1f} GB are free on its disk"
