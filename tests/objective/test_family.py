"""What holds for every objective at the edges of its domain."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_gspo.objective import (
    Tokens,
    clipped_tokens,
    group_relative,
    gspo_token,
    icepop,
    leave_one_out,
    off_policy_sequence_mask,
    sequence_mask,
    truncated_importance_sampling,
)
from tests.objective.batch import random_batch
from tests.objective.family import FAMILY, Member
from tests.objective.formulas import loss_of
from tests.objective.packed import Result, evaluate, f64, tokens_of, totals_of

every_member = pytest.mark.parametrize("name", FAMILY)
# Corrections and a penalty, for what must hold with them too.
OPTIONS = {
    "corrections": [
        ("truncate", partial(truncated_importance_sampling, level="token", high=2.0)),
        ("icepop", partial(icepop, level="sequence", low=0.5, high=5.0)),
        ("sequence_mask", partial(sequence_mask, low=0.5, high=2.0)),
        ("opsm", partial(off_policy_sequence_mask, delta=0.1)),
    ],
    "kl": ("k3", 0.04),
}


def assert_finite(result: Result) -> None:
    assert math.isfinite(result.loss)
    assert result.flat.isfinite().all()
    assert [k for k, v in result.reported.items() if not math.isfinite(v)] == []


@every_member
@pytest.mark.parametrize("rewards", [[7.3, 100.1, 0.1], [0.7, 0.7, 0.7]], ids=["groups of one", "equal rewards"])
def test_without_a_signal_loss_and_gradient_are_exactly_zero(name: str, rewards: list[float]):
    group = torch.arange(3) if len(set(rewards)) == 3 else torch.zeros(3, dtype=torch.int64)
    new, old = [[-1.0, -60.0], [-100.0], [-1.0]], [[-2.0, -1.0], [-1.0], [-101.0]]
    for advantages in (
        group_relative(f64(*rewards), group, normalize_std=True, eps=0.0),
        group_relative(f64(*rewards), group, normalize_std=False, eps=0.0),
        leave_one_out(f64(*rewards), group),
    ):
        result = evaluate(tokens_of(new, old, advantages=advantages, rollout=old), FAMILY[name])
        assert result.loss == 0 and not result.flat.any()


@every_member
def test_masked_responses_add_nothing_and_still_count_as_sequences(name: str):
    member, batch = FAMILY[name], random_batch((5, 3, 4))
    whole = evaluate(batch.tokens(member), member)
    totals = totals_of(batch.tokens(member))
    without = evaluate(batch.tokens(member, [0, 2]), member, totals)
    batch.mask[1][:] = False
    tokens = batch.tokens(member)
    result = evaluate(tokens, member, totals)
    assert result.loss == pytest.approx(without.loss, abs=2**-52) and result.loss != whole.loss
    assert torch.equal(result.gradient[0], without.gradient[0]) and torch.equal(result.gradient[2], without.gradient[1])
    assert not result.gradient[1].any()
    assert result.metrics["ratio"].values.isnan().tolist() == [False, True, False]
    assert result.bad_rows == []


@every_member
@pytest.mark.parametrize("lens", [(), (0,), (3, 2)], ids=["no rows", "an empty row", "masked rows"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "corrected"])
def test_an_empty_micro_batch_yields_a_zero_that_can_be_differentiated(name: str, lens: tuple[int, ...], options):
    """And metrics of the names and types of a full one, or ranks could not reduce them together."""
    member, batch = FAMILY[name], random_batch(lens)
    for row in batch.mask:
        row[:] = False
    result = evaluate(batch.tokens(member, ref=True), member, **options)
    assert result.loss == 0 and not result.flat.any()
    full = evaluate(random_batch((4, 2)).tokens(member, ref=True), member, **options)
    assert {k: type(v) for k, v in result.metrics.items()} == {k: type(v) for k, v in full.metrics.items()}
    assert result.reported["num_bad_sequences"] == result.reported["clip_fraction"] == 0


@every_member
def test_one_token(name: str):
    member, batch = FAMILY[name], random_batch((1,))
    y = batch.responses(member)
    expected = loss_of(name, member.aggregation, y, y, max_tokens=8)
    assert evaluate(batch.tokens(member), member).loss == pytest.approx(expected, rel=1e-14)


@every_member
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "corrected"])
def test_advantages_of_responses_are_those_of_their_tokens(name: str, options):
    """Given as [m] or spread over [t], which GSPO computes in two ways: the gradient is the same bit for bit."""
    member, batch = FAMILY[name], random_batch((9, 1, 30, 4, 0), seed=2)
    batch.token_advantages[:] = [
        torch.full_like(row, a) for row, a in zip(batch.new, batch.advantages.tolist(), strict=True)
    ]
    of_responses, of_tokens = (
        evaluate(batch.tokens(replace(member, token_advantages=per_token), ref=True), member, **options)
        for per_token in (False, True)
    )
    assert torch.equal(of_responses.flat, of_tokens.flat) and of_tokens.flat.any()
    assert of_responses.loss == pytest.approx(of_tokens.loss, rel=1e-14)
    assert of_responses.reported == pytest.approx(of_tokens.reported, rel=1e-13, abs=1e-15)


def test_for_one_token_the_sequence_ratio_is_that_of_the_token():
    batch = random_batch((1, 1, 1, 1), drift=0.3)
    sequence, token = (
        evaluate(batch.tokens(member), member)
        for member in (
            Member(partial(f, clip_low=0.2, clip_high=0.2), "token_mean") for f in (gspo_token, clipped_tokens)
        )
    )
    assert sequence.loss == token.loss and torch.equal(sequence.flat, token.flat)


@every_member
def test_fifty_thousand_tokens(name: str):
    """Against exactly rounded sums. Log-ratios of 0.15 in size add up to 0.05, so that sequence ratios stay near 1."""
    member, batch = FAMILY[name], random_batch((50_000, 3))
    mask = batch.mask[0]
    excess = (batch.new[0] - batch.old[0])[mask].sum() - 0.05
    batch.new[0][mask] -= excess / mask.sum()
    y = batch.responses(member)
    result = evaluate(batch.tokens(member), member)
    assert result.loss == pytest.approx(loss_of(name, member.aggregation, y, y, max_tokens=8), rel=1e-12)
    log_r = [x for row in y for x in row.log_r]
    assert result.reported["kl_k1"] == pytest.approx(-math.fsum(log_r) / len(log_r), rel=1e-11)
    assert result.metrics["ratio"].values[0].item() == pytest.approx(
        math.exp(math.fsum(y[0].log_r) / len(y[0].new)), rel=1e-14
    )


@every_member
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0, -1e9])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "corrected"])
def test_extreme_ratios(name: str, dtype: torch.dtype, advantage: float, options):
    """Ratios beyond e^10, log-ratios of +-100 in one response, and beyond 709.78, where float64's exp overflows.

    The last response is one whose ratio is as large and that has masked tokens, in whose place 0 x inf would be nan.
    """
    new = [[-0.5, -100.5], [-0.1, -12.0, -1.0], [-0.5], [-800.5], [-0.5, -900.0], [-1e30], [-0.25], [-0.5] * 2]
    old = [[-100.5, -0.5], [-12.0, -0.1, -1.0], [-800.5], [-0.5], [-900.0, -0.5], [-1.0], [-1e30], [-900.0] * 2]
    mask = [[1.0] * len(row) for row in new[:-1]] + [[1.0, 0.0]]
    tokens = tokens_of(new, old, advantages=[advantage] * 8, mask=mask, rollout=old, ref=new, dtype=dtype)
    result = evaluate(tokens, FAMILY[name], **options)
    assert_finite(result)
    assert result.bad_rows == []


@every_member
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "corrected"])
def test_garbage_at_masked_positions_changes_no_bit(name: str, garbage: float, options):
    member = FAMILY[name]
    results = []
    for value in (-1.0, garbage):
        batch = random_batch((9, 11, 8), seed=3)
        assert sum((~mask).sum() for mask in batch.mask) >= 3
        for side in (batch.new, batch.old, batch.rollout, batch.ref, batch.token_advantages):
            for row, mask in zip(side, batch.mask, strict=True):
                row[~mask] = value
        results.append(evaluate(batch.tokens(member, ref=True), member, **options))
    clean, dirty = results
    assert dirty.loss == clean.loss and torch.equal(dirty.flat, clean.flat)
    assert dirty.reported == clean.reported


@every_member
@pytest.mark.parametrize(
    ("side", "value"),
    [
        *[("new", x) for x in (math.nan, math.inf)],
        *[(side, x) for side in ("old", "rollout", "ref") for x in (math.nan, math.inf, -math.inf)],
    ],
)
def test_a_bad_value_drops_its_sequence_and_names_its_row(name: str, side: str, value: float):
    """All else is as if the sequence were masked, totals included: N and T count it."""
    member, batch = FAMILY[name], random_batch((5, 6, 4))
    totals = totals_of(batch.tokens(member))
    uses = {"rollout": side == "rollout" or name == "minirl", "ref": side == "ref"}
    options = {"kl": ("k3", 0.04)} if side == "ref" else {}
    getattr(batch, side)[1][0] = value
    bad = evaluate(batch.tokens(member, **uses), member, totals, **options)
    batch.mask[1][:] = False
    masked = evaluate(batch.tokens(member, **uses), member, totals, **options)
    assert bad.loss == masked.loss and torch.equal(bad.flat, masked.flat)
    flags = {"num_bad_sequences": 1.0, "num_bad_sequences/first_row": 1.0}
    assert bad.reported == masked.reported | flags


@every_member
def test_a_bad_sequence_is_named_by_its_row_in_the_batch(name: str):
    tokens = tokens_of(
        [[-1.0, math.nan], [-1.0], [math.nan]], advantages=[1, 1, 1], rows=[7, 3, 5], rollout=[[0.0] * 2, [0.0], [0.0]]
    )
    result = evaluate(tokens, FAMILY[name])
    assert result.bad_rows == [7, 5]
    assert result.reported["num_bad_sequences"] == 2 and result.reported["num_bad_sequences/first_row"] == 5


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "minirl"])
def test_rollout_values_are_judged_only_where_they_are_used(name: str):
    member, batch = FAMILY[name], random_batch((5, 6))
    batch.rollout[0][0] = batch.ref[0][0] = math.nan
    assert evaluate(batch.tokens(member, rollout=False), member).bad_rows == []


@every_member
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "corrected"])
def test_a_new_probability_of_zero_is_a_ratio_of_zero(name: str, advantage: float, options):
    """No defect, no gradient at its token, no nan: what a log-probability of -700 comes close to."""
    results = []
    for impossible in (-math.inf, -700.0):
        tokens = tokens_of(
            [[impossible, -1.0], [-1.0]],
            [[-1.0, -1.0], [-1.0]],
            advantages=[advantage] * 2,
            rollout=[[-1.0, -1.0], [-1.0]],
            ref=[[-1.0, -1.0], [-1.0]],
        )
        results.append(evaluate(tokens, FAMILY[name], **(options and {"corrections": options["corrections"]})))
    result, limit = results
    assert result.bad_rows == []
    assert result.loss == pytest.approx(limit.loss, abs=1e-100)
    assert result.gradient[0][0] == 0 and result.gradient[1].tolist() == limit.gradient[1].tolist()
    assert not any(math.isnan(x) for x in result.reported.values())
    assert result.reported["token_log_ratio_min"] == -math.inf


@pytest.mark.parametrize("r", [1e-3, 4.0, 33.0, 300.0])
def test_sapo_keeps_its_digits_where_the_gate_has_closed(r: float):
    """f'(r) r = r / cosh( tau (r - 1) / 2 )^2, of which 1 - sigmoid would keep no digit at r = 33."""
    slope = r / math.cosh(1.05 * (r - 1) / 2) ** 2
    result = evaluate(tokens_of([[-0.5]], [[-0.5 - math.log(r)]], advantages=[-1]), FAMILY["sapo"])
    assert result.flat.item() == pytest.approx(slope, rel=1e-11)


@pytest.mark.parametrize(
    ("new", "old", "advantage"), [(6e-8, -0.7, 1), (0.0, -0.7, 1), (-0.7, 0.0, -1), (-0.7, 6e-8, -1)]
)
def test_dppo_masks_steps_to_and_from_certainty(new: float, old: float, advantage: float):
    """A probability of 1, or of a little more by rounding: the divergence is infinite or log 2, and never nan."""
    result = evaluate(tokens_of([[new]], [[old]], advantages=[advantage]), FAMILY["dppo_kl"])
    assert result.loss == 0 and result.flat.item() == 0 and result.reported["clip_fraction"] == 1


def test_dppo_lets_certainty_stay():
    result = evaluate(tokens_of([[0.0]], [[0.0]], advantages=[1]), FAMILY["dppo_kl"])
    assert result.flat.item() == -1 and result.reported["clip_fraction"] == 0


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"expected one element per token, \[5\], got \{'old_logp': \[6\]\}"):
        tokens_of([[0.1, 0.2]], [[0.0] * 3], advantages=[1])
    with pytest.raises(ValueError, match=r"expected one element per sequence, \[1\], got \{'advantages': \[2\]\}"):
        tokens_of([[0.1, 0.2]], advantages=[1, 1])
    with pytest.raises(ValueError, match=r"expected one element per token, \[5\], got \{'ref_logp': \[4\]\}"):
        tokens_of([[0.1, 0.2]], advantages=[1], ref=[[0.1]])
    with pytest.raises(ValueError, match=r"\[t\] and \[m\] are told apart by size, and both are 2"):
        offsets = torch.tensor([0, 2, 2])
        two = torch.zeros(2)
        Tokens(
            logp=two,
            old_logp=two,
            mask=two.bool(),
            offsets=offsets,
            trained_lens=offsets[1:],
            rows=offsets[1:],
            advantages=two,
            group=None,
        )
