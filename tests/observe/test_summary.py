from __future__ import annotations

import re

from megatron_gspo.config.schema import ObserveConfig
from megatron_gspo.observe import MetricsLog, summary_table


def test_start_and_end_are_means_over_five_percent_of_the_steps(tmp_path):
    log = MetricsLog(tmp_path, ObserveConfig())
    for step in range(40):
        log.log(
            step,
            {
                "reward/mean": step / 100,
                "objective/ratio/min": 1.0 - step / 1000,
                "objective/ratio/max": 1.0 + step / 1000,
                "time/rollout": 1.5,
                "time/step": 2.0,
            },
        )
    log.close()
    lines = summary_table(tmp_path).splitlines()
    cells = {label.strip(): values for label, *values in (re.split(r"  +", line.strip()) for line in lines)}
    assert cells["reward"] == ["0.005", "0.385"]
    assert cells["ratio, smallest"] == ["0.999000", "0.961000"]
    assert cells["ratio, largest"] == ["1.001000", "1.039000"]
    assert cells["rollout (s)"] == ["1.50", "1.50"]
    assert lines[0].split() == ["steps", "1-2", "steps", "39-40"]
    assert not any("entropy" in line for line in lines)  # not recorded
    assert str(tmp_path / "tensorboard") in lines[-1]


def test_every_metric_of_the_users_reward_has_a_line_and_idle_phases_have_none(tmp_path):
    log = MetricsLog(tmp_path, ObserveConfig())
    log.log(
        0, {"reward/mean": 0.5, "reward/digits": 0.25, "objective/loss": 1.0, "time/score": 1e-4, "time/update": 1.0}
    )
    log.close()
    table = summary_table(tmp_path)
    assert re.search(r"^  reward/digits +0.250 +0.250$", table, re.MULTILINE)
    assert table.index("reward/digits") < table.index("loss")
    assert "update (s)" in table and "score (s)" not in table


def test_a_run_without_steps_says_so(tmp_path):
    assert "no steps were recorded" in summary_table(tmp_path)
