"""The trained policy as an HF checkpoint in run.dir/hf: made beside the one that is there, then put in its place."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.loop.checkpoints import EXPORT_DIR, STATE_FILE, RunState, flush
from megatron_gspo.weights.export import ExportPlan
from megatron_gspo.weights.save import save_hf


def export_policy(run_dir: Path, plan: ExportPlan, source_dir: str, state: RunState, group: dist.ProcessGroup) -> Path:
    """Write the export of `state`, with config and tokenizer of `source_dir`; returns its folder. Collective.

    An earlier export stays until the new one is whole. `run_state.json` in the folder says which step it is of.
    """
    target, new, first = run_dir / EXPORT_DIR, run_dir / f".{EXPORT_DIR}.new", dist.get_rank(group) == 0
    if first and new.exists():  # left by a run that was killed while exporting
        shutil.rmtree(new)
    dist.barrier(group)
    save_hf(new, plan, source_dir)
    if first:
        (new / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        flush(new)
        swap(new, target)
    dist.barrier(group)
    return target


def swap(new: Path, target: Path) -> None:
    """Put the folder `new` in the place of `target`. Killed in between, it leaves the old one under its own name, or as
    `.NAME.old`."""
    old = target.with_name(f".{target.name}.old")
    if old.exists() and target.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    new.rename(target)
    if old.exists():
        shutil.rmtree(old)
