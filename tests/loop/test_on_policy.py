"""The check of the first mini-batch: the ratios of an unchanged policy are 1, or all ranks stop together."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.config import (
    CispoConfig,
    GrpoConfig,
    GspoConfig,
    MinirlConfig,
    ObjectiveConfig,
    OnRatio,
    SapoConfig,
    SftConfig,
    VespoConfig,
)
from megatron_gspo.loop.on_policy import OffPolicy, check_on_policy
from megatron_gspo.objective.metrics import Max, Min
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        (GspoConfig(), 3e-5),
        (GspoConfig(clip_low=0.5, clip_high=0.9), 0.02),
        (GrpoConfig(), 0.02),
        (GrpoConfig(clip_high=0.1), 0.01),
        (SapoConfig(), 0.02),
        (CispoConfig(), 0.02),
        (MinirlConfig(clip_low=0.05), 0.005),
    ],
)
def test_the_bound_is_a_tenth_of_the_smaller_clip_bound_and_at_most_2_percent(config, bound):
    assert config.on_policy_bound == pytest.approx(bound)


def outcome(config: ObjectiveConfig, ratios: list[float]) -> str:
    """What a rank with the ratio of its number makes of it; "" where it goes on. The last one has no metrics."""
    value = torch.tensor(ratios[dist.get_rank()])
    metrics = {
        "abs_log_ratio_max": Max(value.abs()),
        "token_log_ratio_min": Min(-value.abs() / 100),
        "token_log_ratio_max": Max(value.abs() / 200),
    }
    try:
        check_on_policy(config, [] if math.isnan(value) else [metrics], dist.group.WORLD)
    except OffPolicy as error:
        return str(error)
    return ""


def test_one_rank_beyond_the_bound_stops_all_of_them():
    for message in run_ranks(3, outcome, GspoConfig(), [0.0, -4e-5, math.nan]):
        assert "reaches 4.000e-05 before any update, above 3.0e-05" in message
    assert run_ranks(3, outcome, GspoConfig(), [0.0, 2e-5, math.nan]) == ["", "", ""]


def test_a_ratio_of_whole_responses_is_judged_by_its_tokens():
    assert run_ranks(2, outcome, VespoConfig(), [0.0, 1.0]) == ["", ""]
    assert all("3.000e-02" in message for message in run_ranks(2, outcome, VespoConfig(), [3.0, 0.0]))


def warnings_of(config: ObjectiveConfig) -> list[str]:
    """What a rank with a ratio far beyond the bound says instead of stopping."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron_gspo.loop.on_policy").addHandler(handler)
    assert outcome(config, [1.0]) == ""
    return said


def test_a_recipe_may_ask_for_a_warning_only():
    ((message,),) = run_ranks(1, warnings_of, GspoConfig(on_policy_check=OnRatio.warn))
    assert "reaches 1.000e+00 before any update" in message


def test_an_objective_without_ratios_is_not_checked():
    assert run_ranks(1, warnings_of, SftConfig()) == [[]]
