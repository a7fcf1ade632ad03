"""Corrections by hand, and against plain Python over whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_gspo.objective import (
    Correction,
    Tokens,
    icepop,
    off_policy_sequence_mask,
    sequence_mask,
    truncated_importance_sampling,
)
from megatron_gspo.objective.correction import Weights, apply_corrections
from megatron_gspo.objective.tokens import Ratios, importance_ratios
from tests.objective.batch import random_batch
from tests.objective.family import FAMILY
from tests.objective.packed import TAIL, evaluate, pack, tokens_of

LN2 = math.log(2)
# w is 2, 1/2 and 4 in sequence 0 (geometric mean 4^(1/3) = 1.587, product 4), and 1/8 in the one token of sequence 1.
OLD = [[-3.0, -3.0, -3.0], [-3.0]]
ROLLOUT = [[-3 - LN2, -3 + LN2, -3 - 2 * LN2], [-3 + 3 * LN2]]


def weights_of(tokens: Tokens, *corrections: Correction) -> tuple[list[float], dict[str, float]]:
    """The weight of every token but the tail, whose weight must be 0; and the totals behind each metric."""
    weight, metrics = apply_corrections(importance_ratios(tokens), [(str(k), c) for k, c in enumerate(corrections)])
    assert not weight[-TAIL:].any()
    return weight[:-TAIL].tolist(), {k: v.unpack(k, v.pack(0))[k] for k, v in metrics.items()}


def by_hand() -> Tokens:
    return tokens_of(OLD, OLD, advantages=[1, -1], rollout=ROLLOUT)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [1.5, 0.5, 1.5, 0.125]),
        ("sequence", [1.5, 1.5, 1.5, 0.125]),
        ("sequence_product", [1.5] * 3 + [0.125]),
    ],
)
def test_truncation(level: str, expected: list[float]):
    """Truncated at 1.5, of four tokens: those with w of 2 and 4; or all of sequence 0, at 1.587 or 4."""
    weight, metrics = weights_of(by_hand(), partial(truncated_importance_sampling, level=level, high=1.5))
    assert weight == pytest.approx(expected, rel=1e-15)
    assert metrics["0_fraction"] == (0.5 if level == "token" else 0.75)
    assert metrics["correction_weight"] == pytest.approx(sum(expected) / 4)
    assert metrics["correction_dropped"] == 0
    assert metrics["correction_ess"] == pytest.approx(sum(expected) ** 2 / (4 * sum(w * w for w in expected)))


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [2, 0.5, 0, 0]), ("sequence", [2 ** (2 / 3)] * 3 + [0]), ("sequence_product", [0, 0, 0, 0])],
)
def test_icepop(level: str, expected: list[float]):
    """w within [0.4, 3], else 0."""
    weight, metrics = weights_of(by_hand(), partial(icepop, level=level, low=0.4, high=3.0))
    assert weight == pytest.approx(expected, rel=1e-15)
    assert metrics["0_fraction"] == metrics["correction_dropped"] == sum(w == 0 for w in expected) / 4


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.5, 2, [1, 1, 1, 0]), (0.1, 1.5, [0, 0, 0, 1]), (0.1, 2, [1] * 4)]
)
def test_sequence_mask(low: float, high: float, expected: list[float]):
    """By the geometric means 1.587 and 1/8."""
    weight, metrics = weights_of(by_hand(), partial(sequence_mask, low=low, high=high))
    assert weight == expected
    assert metrics["0_fraction"] == metrics["correction_dropped"] == 1 - sum(expected) / 4


def test_bounds_are_inside():
    """w of 2 and 1/2 are exact for IcePop's bounds if they come out as such."""
    w = [math.exp(LN2), math.exp(-LN2)]
    tokens = tokens_of([[0.0], [0.0]], [[0.0], [0.0]], advantages=[1, 1], rollout=[[-LN2], [LN2]])
    assert weights_of(tokens, partial(icepop, level="token", low=w[1], high=w[0]))[0] == w
    assert weights_of(tokens, partial(sequence_mask, low=w[1], high=w[0]))[0] == [1, 1]
    assert weights_of(tokens, partial(truncated_importance_sampling, level="token", high=w[0]))[1]["0_fraction"] == 0


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_off_policy_sequence_mask(advantage: float):
    """mean log(mu / pi): sequence 0 has (0.3 + 0.5) / 2 = 0.4, sequence 1 has 0.1, sequence 2 has -0.4.

    pi_old takes no part. delta is 0.2: sequence 0 is dropped if its advantage is negative.
    """
    new, rollout = [[-1.3, -1.5], [-1.1], [-0.6]], [[-1.0, -1.0], [-1.0], [-1.0]]
    for old in (new, rollout, [[-2.0, -0.1], [-1.7], [-0.3]]):
        tokens = tokens_of(new, old, advantages=[advantage] * 3, rollout=rollout)
        weight, metrics = weights_of(tokens, partial(off_policy_sequence_mask, delta=0.2))
        assert weight == ([0, 0, 1, 1] if advantage < 0 else [1, 1, 1, 1])
        assert metrics["0_fraction"] == (0.5 if advantage < 0 else 0)


def test_products_are_truncated_in_log_domain():
    """Sums of log-ratios of +-1000 are beyond exp: their weights are the bound and 0, not inf and nan."""
    n = 500
    tokens = tokens_of([[-3.0] * n] * 2, [[-3.0] * n] * 2, advantages=[1, 1], rollout=[[-5.0] * n, [-1.0] * n])
    weight, _ = weights_of(tokens, partial(truncated_importance_sampling, level="sequence_product", high=2.0))
    assert weight == [2.0] * n + [0.0] * n
    weight, _ = weights_of(tokens, partial(icepop, level="sequence_product", low=0.5, high=2.0))
    assert weight == [0.0] * 2 * n
    weight, _ = weights_of(tokens, partial(truncated_importance_sampling, level="sequence", high=2.0))
    assert weight == pytest.approx([2.0] * n + [math.exp(-2)] * n)


def test_corrections_multiply():
    """Truncation at token level gives 1.5, 1/2, 1.5, 1/8, IcePop at sequence level 1.587 and 0."""
    weight, metrics = weights_of(
        by_hand(),
        partial(truncated_importance_sampling, level="token", high=1.5),
        partial(icepop, level="sequence", low=0.5, high=2.0),
    )
    g = 2 ** (2 / 3)
    assert weight == pytest.approx([1.5 * g, 0.5 * g, 1.5 * g, 0], rel=1e-15)
    assert (metrics["0_fraction"], metrics["1_fraction"], metrics["correction_dropped"]) == (0.5, 0.25, 0.25)


# The same in plain Python, of one sequence: (gaps, log(mu / pi), advantages) -> weights
Plain = Callable[[list[float], list[float], list[float]], list[float]]


def at_level(level: str, weigh: Callable[[float], float]) -> Plain:
    def weights(gaps: list[float], left: list[float], advantages: list[float]) -> list[float]:
        total, n = math.fsum(gaps), len(gaps)
        logs = {"token": gaps, "sequence": [total / n] * n, "sequence_product": [total] * n}[level]
        return [weigh(math.exp(x)) for x in logs]

    return weights


def plain_opsm(gaps: list[float], left: list[float], advantages: list[float]) -> list[float]:
    return [0.0 if a < 0 and math.fsum(left) / len(left) > 0.02 else 1.0 for a in advantages]


PLAIN: dict[str, tuple[Correction, Plain]] = {
    **{
        f"truncate {level}": (
            partial(truncated_importance_sampling, level=level, high=1.05),
            at_level(level, lambda w: min(w, 1.05)),
        )
        for level in ("token", "sequence", "sequence_product")
    },
    **{
        f"icepop {level}": (
            partial(icepop, level=level, low=0.95, high=1.05),
            at_level(level, lambda w: w if 0.95 <= w <= 1.05 else 0.0),
        )
        for level in ("token", "sequence", "sequence_product")
    },
    "sequence_mask": (
        partial(sequence_mask, low=0.97, high=1.03),
        at_level("sequence", lambda w: float(0.97 <= w <= 1.03)),
    ),
    "opsm": (partial(off_policy_sequence_mask, delta=0.02), plain_opsm),
}
LENS = (9, 1, 17, 4, 6, 30, 2, 12)


@pytest.mark.parametrize("name", PLAIN)
def test_against_plain_python(name: str):
    correction, plain = PLAIN[name]
    batch = random_batch(LENS, seed=5)
    weight, metrics = weights_of(batch.tokens(FAMILY["grpo"]), correction)
    weight_rows = torch.tensor(weight, dtype=torch.float64).split(LENS)
    expected = []
    for i, y in enumerate(batch.responses(FAMILY["grpo"])):
        gaps = [old - mu for old, mu in zip(y.old, y.rollout, strict=True)]
        left = [mu - new for mu, new in zip(y.rollout, y.new, strict=True)]
        row = plain(gaps, left, y.advantages)
        assert weight_rows[i][batch.mask[i]].tolist() == pytest.approx(row, rel=1e-13)
        assert not weight_rows[i][~batch.mask[i]].any()
        expected += row
    assert metrics["correction_dropped"] == pytest.approx(expected.count(0) / len(expected), abs=1e-15)
    assert metrics["correction_weight"] == pytest.approx(math.fsum(expected) / len(expected), rel=1e-13)
    assert 0 < metrics["0_fraction"] < 1


@pytest.mark.parametrize("name", FAMILY)
def test_terms_are_weighed_and_denominators_stay(name: str):
    """Weights of 1.5 scale loss and gradient by it; a mask leaves the gradient of what it keeps as it was."""
    member, batch = FAMILY[name], random_batch(LENS, seed=6)
    plain = evaluate(batch.tokens(member), member)
    scaled = evaluate(batch.tokens(member), member, corrections=[("c", lambda x: constant(x, 1.5))])
    assert scaled.loss == pytest.approx(1.5 * plain.loss, rel=1e-14)
    torch.testing.assert_close(scaled.flat, 1.5 * plain.flat, rtol=1e-14, atol=0)
    assert scaled.reported["clip_fraction"] == plain.reported["clip_fraction"]

    masked = evaluate(batch.tokens(member), member, corrections=[("m", PLAIN["sequence_mask"][0])])
    weight, _ = weights_of(batch.tokens(member), PLAIN["sequence_mask"][0])
    assert torch.equal(masked.flat, plain.flat * torch.tensor(weight).double())


def constant(x: Ratios, value: float) -> Weights:
    return Weights(weight=torch.full_like(x.log_ratio, value), touched=torch.zeros_like(x.used))


@pytest.mark.parametrize("name", FAMILY)
def test_nothing_changes_where_the_engines_agree(name: str):
    """OPSM looks at the trained policy too and is not among them. GSPO's loss, a sum over sequences, becomes one over
    their tokens."""
    member, batch = FAMILY[name], random_batch(LENS, seed=7, gap=0.0)
    plain = evaluate(batch.tokens(member), member)
    corrections = [(k, correction) for k, (correction, _) in PLAIN.items() if k != "opsm"]
    result = evaluate(batch.tokens(member), member, corrections=corrections)
    assert result.loss == pytest.approx(plain.loss, rel=1e-15)
    assert torch.equal(result.flat, plain.flat)
    assert all(result.reported[f"{k}_fraction"] == 0 for k, _ in corrections)
    assert result.reported["correction_weight"] == result.reported["correction_ess"] == 1


def test_the_penalty_is_not_weighed():
    """With everything dropped, what is left is the penalty alone."""
    member, batch = FAMILY["grpo"], random_batch(LENS)
    drop = ("drop", lambda x: constant(x, 0.0))
    whole = evaluate(batch.tokens(member, ref=True), member, kl=("k3", 0.1))
    plain = evaluate(batch.tokens(member, ref=True), member)
    left = evaluate(batch.tokens(member, ref=True), member, corrections=[drop], kl=("k3", 0.1))
    assert left.loss == pytest.approx(whole.loss - plain.loss, rel=1e-12)
    torch.testing.assert_close(left.flat, whole.flat - plain.flat, rtol=1e-12, atol=1e-16)
    assert left.reported["correction_dropped"] == 1 and left.reported["correction_ess"] == 0


def test_a_bad_rollout_value_makes_its_sequence_bad_where_it_is_used():
    rollout = [[-1.0, math.nan], [-1.0]]
    for used, bad in ((rollout, [0]), (None, [])):
        tokens = tokens_of([[-1.0, -1.0], [-1.0]], [[-1.0, -1.0], [-1.0]], advantages=[1, 1], rollout=used)
        x = importance_ratios(tokens)
        assert x.bad.nonzero().flatten().tolist() == bad
        if used:
            assert x.log_gap.isfinite().all() and x.gap_mean.isfinite().all()


def test_there_is_no_gap_without_rollout_values():
    """A weight of 1 in its place would correct nothing, in silence."""
    x = importance_ratios(tokens_of([[-1.0]], [[-2.0]], advantages=[1]))
    for ask in (lambda: x.log_gap, lambda: x.gap_mean):
        with pytest.raises(ValueError, match="rollout_logp is None, and the gap to the rollout engine is asked for"):
            ask()
    assert torch.equal(x.old_logp, pack([[-2.0]], 0.0))


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="level is 'batch'; expected token, sequence or sequence_product"):
        weights_of(by_hand(), partial(icepop, level="batch", low=0.5, high=2.0))
