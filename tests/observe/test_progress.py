from __future__ import annotations

import io

from rich.console import Console

from megatron_gspo.observe import Progress, progress


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_off_a_terminal_first_and_last_step_are_plain_lines(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = plain()
    display = Progress(100, first_step=90, console=console)
    for step in range(90, 100):
        now[0] += 2.0
        display.activity("sampled 3 of 512")
        display.update(step, {"reward/mean": 0.25, "perf/tokens_per_s": 12345.6, "time/step": 2.0})
    display.close()
    assert console.file.getvalue().splitlines() == [
        "step 91/100  reward 0.250  tokens/s 12,346  left 0:00:18",
        "step 99/100  reward 0.250  tokens/s 12,346  left 0:00:02",  # 15 s have passed since the last line
        "step 100/100  reward 0.250  tokens/s 12,346  left 0:00:00",
    ]


def test_one_long_step_does_not_lengthen_what_is_left(monkeypatch):
    """The first step loads what the others find loaded, and starting the run took a minute."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    console = plain()
    display = Progress(6, console=console)
    for step, seconds in enumerate((30.0, 2.0, 3.0, 2.0)):
        display.update(step, {"time/step": seconds})
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "step 1/6  left 0:02:30", "step 2/6  left 0:01:04", "step 3/6  left 0:00:09", "step 4/6  left 0:00:05",
    ]  # fmt: skip


def test_on_a_terminal_the_step_and_its_metrics_are_shown():
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    display = Progress(10, console=console)
    display.activity("sampled 3 of 512")
    display.update(4, {"reward/exact": 0.5, "time/step": 12.0})
    display.close()
    assert "5/10" in console.file.getvalue()
    assert "exact 0.500" in console.file.getvalue()
    assert "left 0:01:00" in console.file.getvalue()
