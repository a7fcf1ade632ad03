"""The product's own steps, run as a user runs them (`megatron-gspo train`) and read from its metrics.jsonl."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.processes import run_watched
from bench.shapes import PROMPT_TOKENS, Shape
from megatron_gspo.observe import read_metrics

PHASES = ("rollout", "pack", "score", "update", "sync", "step")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both sides share, and how ours is laid out."""

    policy: Path
    steps: int
    mini_batches: int
    lr: float
    clip_low: float
    clip_high: float
    workers: int
    threads: int  # per worker
    max_tokens: int


def recipe(settings: Settings, shape: Shape, run_dir: Path, records: Path | None) -> dict[str, Any]:
    """The demo's recipe on a batch of `shape`; with `records` nothing is sampled."""
    return {
        "run": {
            "dir": str(run_dir),
            "steps": settings.steps,
            "workers": settings.workers,
            "threads": settings.threads,
            "export_hf": False,
        },
        "policy": {
            "hf": str(settings.policy),
            "dtype": "fp32",
            "layout": {"ep": settings.workers},
            "optimizer": {"lr": settings.lr},
        },
        "objective": {"name": "gspo", "clip_low": settings.clip_low, "clip_high": settings.clip_high},
        "advantage": {},
        "batch": {
            "prompts": shape.prompts,
            "samples": shape.samples,
            "mini_batches": settings.mini_batches,
            "max_tokens": settings.max_tokens,
        },
        "data": {"source": "sort_digits", "args": {"length": PROMPT_TOKENS - 1}, "max_prompt_tokens": 64},
        "rollout": {"max_new_tokens": shape.longest, "replay": str(records) if records else None},
        "reward": {"name": "sort_digits"},
    }


def train(settings: Settings, shape: Shape, run_dir: Path, records: Path | None) -> tuple[list[dict], dict[str, float]]:
    """Run the recipe in `run_dir`; returns its metrics, one record a step, and the peak memory (GB) by process."""
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe(settings, shape, run_dir, records)))
    command = [sys.executable, "-m", "megatron_gspo", "train", str(path)]
    peaks = run_watched(command, run_dir.with_suffix(".log"))
    return read_metrics(run_dir), peaks


def phases(metrics: list[dict]) -> list[dict[str, float]]:
    """Seconds by phase of every step."""
    return [{phase: step[f"time/{phase}"] for phase in PHASES} for step in metrics]
