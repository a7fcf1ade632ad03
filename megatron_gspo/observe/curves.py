"""Metrics of several runs over their steps, one small panel each, as one SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = 3
PANEL_INCHES = (4.2, 2.6)


@dataclass(frozen=True)
class Curve:
    """A panel: a metric, or the band between two of them. `log` is its vertical axis, where 0 has no place."""

    title: str
    metric: str
    upper: str | None = None
    log: bool = False


def draw_curves(
    curves: Sequence[Curve], runs: Mapping[str, Sequence[Mapping[str, Any]]], window: float, path: Path
) -> None:
    """Write the panels of metrics that some run (name -> records) recorded; the same input gives the same bytes.

    Thin lines are the records; thick ones are means over `window`, a share of the run's steps.
    """
    from matplotlib import rc_context  # slow to import, and only a report needs it
    from matplotlib.figure import Figure

    recorded = {metric for records in runs.values() for record in records for metric in record}
    drawn = [curve for curve in curves if curve.metric in recorded]
    rows = -(-len(drawn) // COLUMNS)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megatron-gspo", "font.size": 9}):
        figure = Figure(figsize=(PANEL_INCHES[0] * COLUMNS, PANEL_INCHES[1] * rows + 0.4), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for panel in panels[len(drawn) :]:
            panel.set_visible(False)
        for panel, curve in zip(panels, drawn, strict=False):
            panel.set_title(curve.title, fontsize=9)
            panel.grid(alpha=0.25)
            if curve.log:
                panel.set_yscale("log")
            for number, records in enumerate(runs.values()):
                _draw(panel, curve, records, f"C{number}", window)
        lines = [panels[0].plot([], [], color=f"C{number}")[0] for number in range(len(runs))]
        figure.legend(lines, list(runs), loc="outside upper center", ncols=len(runs), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw(panel: Any, curve: Curve, records: Sequence[Mapping[str, Any]], colour: str, window: float) -> None:
    steps = [record["step"] + 1 for record in records]
    width = max(1, round(window * len(records)))
    smooth = []
    for metric in filter(None, (curve.metric, curve.upper)):
        values = np.array([np.nan if record.get(metric) is None else record[metric] for record in records])
        if curve.log:
            values[values <= 0] = np.nan
        smooth.append(running_mean(values, width))
        panel.plot(steps, values, color=colour, alpha=0.25, linewidth=0.7)
        panel.plot(steps, smooth[-1], color=colour, linewidth=1.5, marker="." if len(steps) == 1 else None)
    if curve.upper:
        panel.fill_between(steps, *smooth, color=colour, alpha=0.08, linewidth=0)


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """[n]: mean over the `width` values up to each, over those that there are; nan counts as none."""
    known = ~np.isnan(values)
    sums, counts = (np.concatenate([[0.0], x.cumsum()]) for x in (np.where(known, values, 0.0), known.astype(float)))
    start = np.maximum(np.arange(len(values)) + 1 - width, 0)
    count = counts[1:] - counts[start]
    return np.where(count > 0, (sums[1:] - sums[start]) / np.maximum(count, 1), np.nan)
