"""How far the run is: a live line on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Live

LINE_EVERY_S = 15.0
RECENT = 20  # steps whose seconds tell how long the others will take

# Shown where the metric is known: metric, label, format.
SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("reward/exact", "exact", ".3f"),
    ("objective/loss", "loss", ".4f"),
    ("perf/tokens_per_s", "tokens/s", ",.0f"),
)


class Progress:
    """Progress of a run of `steps` steps that starts (or resumes) at `first_step`."""

    def __init__(self, steps: int, first_step: int = 0, console: Console | None = None):
        self._steps = steps
        self._console = console or Console()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._last_line: float | None = None
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[metrics]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("[dim]{task.fields[activity]}"),
                console=self._console,
            )
            self._task = self._live.add_task("", total=steps, completed=first_step, metrics="", left="", activity="")
            self._live.start()

    def activity(self, text: str) -> None:
        """What is going on inside the step, such as `sampled 340 of 512`; shown on a terminal only."""
        if self._live:
            self._live.update(self._task, activity=text)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` (from 0) has finished with `metrics`."""
        text, left = describe(metrics), self._left(step, metrics.get("time/step"))
        if self._live:
            self._live.update(self._task, completed=step + 1, metrics=text, left=left)
            return
        now = time.monotonic()
        is_due = self._last_line is None or now - self._last_line >= LINE_EVERY_S or step + 1 == self._steps
        if is_due:
            self._last_line = now
            line = "  ".join(part for part in (f"step {step + 1}/{self._steps}", text, left) if part)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _left(self, step: int, seconds: float | None) -> str:
        """By the median of recent steps, among which one that saves, or the first, is longer than the others."""
        if seconds is None:
            return ""
        self._seconds.append(seconds)
        return f"left {clock(median(self._seconds) * (self._steps - step - 1))}"

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self._live:
            self._live.stop()


def describe(metrics: Mapping[str, float]) -> str:
    """The shown metrics in one line."""
    return "  ".join(f"{label} {metrics[name]:{form}}" for name, label, form in SHOWN if name in metrics)


def clock(seconds: float) -> str:
    """h:mm:ss"""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
