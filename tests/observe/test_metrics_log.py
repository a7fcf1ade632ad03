from __future__ import annotations

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_gspo.config.schema import ObserveConfig
from megatron_gspo.observe import MetricsLog, read_metrics


def write(run_dir, steps, first_step=0, value=0.0):
    log = MetricsLog(run_dir, ObserveConfig(), first_step)
    for step in steps:
        log.log(step, {"reward/mean": value + step})
    log.close()


def test_one_json_object_a_step_on_disk_at_once(tmp_path):
    log = MetricsLog(tmp_path, ObserveConfig())
    log.log(0, {"reward/mean": 0.5, "objective/loss": math.nan})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 0, "reward/mean": 0.5, "objective/loss": None}
    assert "NaN" not in line  # which no JSON parser but Python's reads
    log.close()


def test_resuming_removes_the_steps_that_will_come_again(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, range(3, 6), first_step=3, value=100.0)
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(tmp_path)] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0), (5, 105.0),
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0), (5, 105.0),
    ]  # fmt: skip


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, range(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    write(tmp_path, [2], first_step=2)
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_foreign_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: expected an object with a 'step'"):
        MetricsLog(tmp_path, ObserveConfig(), first_step=2)
