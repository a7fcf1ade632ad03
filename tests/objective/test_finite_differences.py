"""Closed-form slopes against central differences of the published objectives, and what they are on a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_gspo.objective import Objective, clipped_tokens, dppo, gmpo, gspo_token, minirl
from tests.objective.batch import random_batch
from tests.objective.family import FAMILY, Member
from tests.objective.formulas import Response, loss_of
from tests.objective.packed import evaluate, tokens_of, totals_of

every_member = pytest.mark.parametrize("name", FAMILY)
LENS = (7, 1, 12, 4, 9, 2)


@every_member
@pytest.mark.parametrize("seed", [1, 2])
def test_value_and_slope(name: str, seed: int):
    """With steps of 1e-5 central differences are off by about 1e-10 of curvature and 1e-11 of rounding.

    No ratio lies within a step of a bound, or a difference quotient would be half of a slope.
    """
    member, batch = FAMILY[name], random_batch(LENS, seed=seed)
    result = evaluate(tokens := batch.tokens(member), member)
    at, size = batch.responses(member), totals_of(tokens).max_tokens
    assert result.loss == pytest.approx(loss_of(name, member.aggregation, at, at, size), rel=1e-13, abs=1e-15)
    if name not in ("sapo", "vespo"):
        assert 0 < result.reported["clip_fraction"] < 1

    def moved(i: int, t: int, h: float) -> float:
        new = list(at[i].new)
        new[t] += h
        there: list[Response] = [*at[:i], replace(at[i], new=new), *at[i + 1 :]]
        return loss_of(name, member.aggregation, there, at, size)

    h = 1e-5
    for i, mask in enumerate(batch.mask):
        assert not result.gradient[i][~mask].any()
        for t, slope in enumerate(result.gradient[i][mask].tolist()):
            assert slope == pytest.approx((moved(i, t, h) - moved(i, t, -h)) / (2 * h), abs=1e-9), f"row {i}, token {t}"


def ratio_bound(objective: Callable[..., Objective], log_ratio: float, ulps: int) -> Objective:
    """Bounded at exp(log_ratio), or at the next float64 towards 1. Between 1/2 and 2, 1 +- margin is exact."""
    r = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
    margin = abs((math.nextafter(r, 1.0) if ulps else r) - 1)
    return partial(objective, clip_low=margin, clip_high=margin)


def log_bound(objective: Callable[..., Objective], log_ratio: float, ulps: int) -> Objective:
    margin = abs(math.nextafter(log_ratio, 0.0) if ulps else log_ratio)
    return partial(objective, clip_low=margin, clip_high=margin)


def divergence_bound(objective: Callable[..., Objective], log_ratio: float, ulps: int) -> Objective:
    new = torch.tensor(-1 + log_ratio, dtype=torch.float64).exp()
    distance = (new - torch.tensor(-1.0, dtype=torch.float64).exp()).abs().item()
    return partial(objective, threshold=math.nextafter(distance, 0.0) if ulps else distance)


@pytest.mark.parametrize(
    ("objective", "bounded"),
    [
        pytest.param(gspo_token, ratio_bound, id="gspo"),
        pytest.param(clipped_tokens, ratio_bound, id="grpo"),
        pytest.param(gmpo, log_bound, id="gmpo"),
        pytest.param(partial(dppo, divergence="tv", max_ratio=5.0), divergence_bound, id="dppo"),
        pytest.param(partial(minirl, max_weight=5.0), ratio_bound, id="minirl"),
    ],
)
@pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, 0.125), (-1.0, -0.125)])
def test_on_a_bound_the_slope_stays_and_one_ulp_beyond_it_is_gone(
    objective, bounded, advantage: float, log_ratio: float
):
    """-1 and -1 +- 1/8 are exact, so that the log-ratio is. Of one token, the slope is that of the loss, -r A."""
    for ulps in (0, 1):
        tokens = tokens_of([[-1 + log_ratio]], [[-1.0]], advantages=[advantage], rollout=[[-1.0]])
        result = evaluate(tokens, Member(bounded(objective, log_ratio, ulps), "sequence_mean"))
        r = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
        assert result.reported["clip_fraction"] == ulps
        assert result.flat.tolist() == [0 if ulps else -r * advantage]


@every_member
def test_without_advantage_nothing_is_clipped(name: str):
    tokens = tokens_of([[-0.1, -4.0], [-3.0]], [[-2.0, -2.0], [-1.0]], advantages=[0, 0], rollout=[[-2.0] * 2, [-2.0]])
    assert evaluate(tokens, FAMILY[name]).reported["clip_fraction"] == 0


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "dr_grpo", "gmpo"])
@pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, -2.0), (-1.0, 2.0)])
def test_only_what_would_raise_the_objective_is_clipped(name: str, advantage: float, log_ratio: float):
    tokens = tokens_of([[-3 + log_ratio]], [[-3.0]], advantages=[advantage])
    result = evaluate(tokens, FAMILY[name], totals_of(tokens, max_tokens=1))
    assert result.reported["clip_fraction"] == 0
    assert result.flat.item() == pytest.approx(-math.exp(log_ratio) * advantage, rel=1e-15)
