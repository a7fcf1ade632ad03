"""The penalty on the divergence from a reference policy: estimates, slopes, aggregation, and bad values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.objective.batch import random_batch
from tests.objective.family import FAMILY
from tests.objective.packed import evaluate, tokens_of, totals_of

ESTIMATES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATES)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", LN4 := math.log(4), 1), ("k2", LN4**2 / 2, LN4), ("k3", LN4 - 0.75, 0.75)]
)
def test_by_hand(estimator: str, value: float, slope: float):
    """pi = 4 pi_ref: d = log 4, exp(-d) - 1 = -3/4. One token, A = 0: the loss is the penalty, 0.1 times that."""
    tokens = tokens_of([[-1.0]], [[-1.0]], advantages=[0], ref=[[-1 - math.log(4)]])
    result = evaluate(tokens, FAMILY["grpo"], kl=(estimator, 0.1))
    assert result.loss == pytest.approx(0.1 * value, rel=1e-14)
    assert result.flat.tolist() == pytest.approx([0.1 * slope], rel=1e-14)
    assert result.reported["kl_reference"] == pytest.approx(value, rel=1e-14)


@every_estimator
@pytest.mark.parametrize("name", FAMILY)
def test_value_and_slope(name: str, estimator: str):
    """Against plain Python and its central differences; the penalty adds up as the terms do, with their weights."""
    member, batch = FAMILY[name], random_batch((7, 1, 12, 4), seed=4, drift=0.4)
    tokens = batch.tokens(member, ref=True)
    totals, beta, f = totals_of(tokens), 0.3, ESTIMATES[estimator]
    without = evaluate(batch.tokens(member, ref=True), member)
    result = evaluate(tokens, member, kl=(estimator, beta))
    weights = {
        "sequence_mean": lambda n: 1 / (4 * n),
        "token_mean": lambda n: 1 / totals.num_tokens,
        "sequence_sum": lambda n: 1 / 4,
        "constant": lambda n: 1 / (4 * totals.max_tokens),
    }[member.aggregation]
    penalty, total, h = 0.0, 0.0, 1e-5
    for i, mask in enumerate(batch.mask):
        weight = weights(int(mask.sum()))
        d = (batch.new[i] - batch.ref[i])[mask].tolist()
        penalty += weight * math.fsum(map(f, d))
        total += math.fsum(map(f, d))
        slope = torch.tensor([beta * weight * (f(x + h) - f(x - h)) / (2 * h) for x in d], dtype=torch.float64)
        torch.testing.assert_close(result.gradient[i][mask] - without.gradient[i][mask], slope, rtol=0, atol=1e-9)
        assert not result.gradient[i][~mask].any()
    assert result.loss - without.loss == pytest.approx(beta * penalty, rel=1e-12, abs=1e-15)
    assert result.reported["kl_reference"] == pytest.approx(total / totals.num_tokens, rel=1e-13)


@every_estimator
def test_the_policy_that_is_its_reference_pays_exactly_nothing(estimator: str):
    member, batch = FAMILY["grpo"], random_batch((7, 3))
    batch.ref[:] = batch.new
    plain = evaluate(batch.tokens(member, ref=True), member)
    result = evaluate(batch.tokens(member, ref=True), member, kl=(estimator, 1.0))
    assert result.loss == plain.loss and result.reported["kl_reference"] == 0
    # k1's slope is 1 everywhere: in expectation it pushes nowhere, for the mean of d log pi is 0.
    assert torch.equal(result.flat, plain.flat) == (estimator != "k1")


@every_estimator
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_reference_value_drops_its_sequence(estimator: str, value: float):
    ref = [[-1.0, value], [-1.5]]
    tokens = tokens_of([[-1.0, -1.0], [-1.0]], advantages=[0, 0], ref=ref, old=[[-1.0, -1.0], [-1.0]])
    result = evaluate(tokens, FAMILY["grpo"], kl=(estimator, 1.0))
    assert result.bad_rows == [0]
    assert result.loss == pytest.approx(ESTIMATES[estimator](0.5) / 2)  # of row 1, over N = 2
    assert result.gradient[0].tolist() == [0, 0]


@every_estimator
def test_a_new_probability_of_zero_pays_nothing(estimator: str):
    tokens = tokens_of([[-math.inf, -1.0]], [[-1.0, -1.0]], advantages=[0], ref=[[-1.0, -1.5]])
    result = evaluate(tokens, FAMILY["grpo"], kl=(estimator, 1.0))
    assert result.loss == pytest.approx(ESTIMATES[estimator](0.5) / 2)
    assert result.gradient[0][0] == 0 and result.bad_rows == []


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_far_from_the_reference_all_stays_finite(estimator: str, dtype: torch.dtype):
    tokens = tokens_of([[-900.0], [-0.5]], [[-900.0], [-0.5]], advantages=[1, 1], ref=[[-0.5], [-900.0]], dtype=dtype)
    result = evaluate(tokens, FAMILY["grpo"], kl=(estimator, 0.04))
    assert math.isfinite(result.loss) and result.flat.isfinite().all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator is 'k4'; expected k1, k2 or k3"):
        evaluate(tokens_of([[-1.0]], advantages=[1], ref=[[-1.0]]), FAMILY["grpo"], kl=("k4", 1.0))
