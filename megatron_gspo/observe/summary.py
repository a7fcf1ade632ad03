"""The table at the end of a run: where it started and where it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_gspo.observe.metrics_log import METRICS_FILE, TENSORBOARD_DIR, read_metrics

WINDOW = 0.05  # share of the steps that make up the start, and the end

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A line of the table. `over` joins the steps of a window."""

    label: str
    metric: str
    form: str = ".3f"
    over: Callable[[list[float]], float] = fmean


ROWS = (
    Row("reward", "reward/mean"),
    Row("exact match", "reward/exact"),
    Row("rewards that failed, a step", "reward/errors", ".1f"),
    Row("loss", "objective/loss", ".4f"),
    Row("response length (tokens)", "response/length", ".1f"),
    Row("clip fraction", "objective/clip_fraction"),
    Row("ratio, mean", "objective/ratio/mean", ".6f"),
    Row("ratio, smallest", "objective/ratio/min", ".6f", min),
    Row("ratio, largest", "objective/ratio/max", ".6f", max),
    Row("entropy (nats)", "policy/entropy"),
    Row("|logp trainer - rollout|", "policy/logp_diff", ".2e"),
    Row("gradient norm", "policy/grad_norm"),
    Row("tokens/s", "perf/tokens_per_s", ",.0f"),
    Row("step (s)", "time/step", ".2f"),
)
OWN_REWARDS = 2  # where those of the reward function come in
SHORTEST_S = 0.005  # what rounds to nothing


def summary_table(run_dir: str | Path) -> str:
    """Start and end of the run (means over its first and last 5 % of steps), and where to look further. Metrics that
    the run did not record are left out."""
    records = read_metrics(run_dir)
    if not records:
        return f"{run_dir}: no steps were recorded"
    window = max(1, round(WINDOW * len(records)))
    start, end = records[:window], records[-window:]
    lines = [("", *(f"steps {steps[0]['step'] + 1}-{steps[-1]['step'] + 1}" for steps in (start, end)))]
    for row in (*ROWS[:OWN_REWARDS], *_own_rewards(records), *ROWS[OWN_REWARDS:], *_phases(records)):
        cells = [_cell(row, steps) for steps in (start, end)]
        if any(cells):
            lines.append((row.label, *cells))
    return "\n".join([*_align(lines), "", *_where(Path(run_dir))])


def _own_rewards(records: Records) -> list[Row]:
    """What the reward function returned besides the reward, and what follows from rewards."""
    known = {row.metric for row in ROWS}
    return [Row(f"  {name}", name) for name in _names(records, "reward/") if name not in known]


def _phases(records: Records) -> list[Row]:
    """Phases that take time in this run; supervised steps, for one, enter some with nothing to do."""
    names = [name for name in _names(records, "time/") if name != "time/step"]
    taken = [name for name in names if max(record.get(name) or 0.0 for record in records) >= SHORTEST_S]
    return [Row(f"  {name.removeprefix('time/')} (s)", name, ".2f") for name in taken]


def _names(records: Records, prefix: str) -> list[str]:
    """Recorded metrics of that prefix, in order of appearance."""
    return list({name: None for record in records for name in record if name.startswith(prefix)})


def _cell(row: Row, steps: Records) -> str:
    values = [step[row.metric] for step in steps if step.get(row.metric) is not None]
    return format(row.over(values), row.form) if values else ""


def _align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    first, *others = (max(len(cell) for cell in column) for column in zip(*lines, strict=True))
    return [
        "  ".join([line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))])
        for line in lines
    ]


def _where(run_dir: Path) -> list[str]:
    tensorboard = Path(sys.executable).with_name("tensorboard")  # found without activating the environment
    return [
        f"run folder:  {run_dir}  (every step: {METRICS_FILE})",
        f"TensorBoard: {tensorboard} --logdir {run_dir / TENSORBOARD_DIR}",
    ]
