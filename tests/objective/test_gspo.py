"""GSPO by hand, by finite differences, and at the edges of its domain."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_gspo.objective import gspo_loss
from megatron_gspo.objective.metrics import Metric
from megatron_gspo.objective.ratio import segment_sum


def gspo(
    logp: Tensor, old_logp: Tensor, mask: list[bool], offsets: list[int], advantages: list[float], **changed
) -> tuple[Tensor, dict[str, Metric]]:
    starts, trains = torch.tensor(offsets), torch.tensor(mask, dtype=torch.bool)
    m = len(offsets) - 1
    lens = torch.tensor([int(trains[a:b].sum()) for a, b in pairwise(offsets)], dtype=torch.int64)
    defaults = dict(rows=torch.arange(m), clip_low=0.1, clip_high=0.2, num_sequences=max(m, 1), group=None)
    advantage = torch.tensor(advantages, dtype=torch.float64)
    return gspo_loss(logp, old_logp, trains, starts, lens, advantage, **{**defaults, **changed})


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64)


def test_by_hand():
    """Sequence 0: log-ratios 0.2 and 0 (and a masked one): s = e^0.1 = 1.105, inside [0.9, 1.2], A = 2.

    Sequence 1: log-ratio 0.5, s = e^0.5 = 1.649 is clipped to 1.2 at A = 1. N = 4.
    Loss: -(2 e^0.1 + 1.2) / 4. Gradient of a token of sequence 0: -2 e^0.1 / (4 x 2); of sequence 1: 0.
    """
    logp = leaf(0.2, 7.0, 0.0, 0.5)
    loss, metrics = gspo(logp, zeros(4), [True, False, True, True], [0, 3, 4], [2, 1], num_sequences=4)
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * math.exp(0.1) + 1.2) / 4, rel=1e-15)
    assert logp.grad.tolist() == pytest.approx([-math.exp(0.1) / 4, 0, -math.exp(0.1) / 4, 0], rel=1e-15)
    assert metrics["clip_fraction"].unpack("x", metrics["clip_fraction"].pack(0)) == {"x": 1 / 3}  # 1 token of 3
    assert metrics["clip_fraction_sequence"].unpack("x", metrics["clip_fraction_sequence"].pack(0)) == {"x": 1 / 2}
    assert metrics["kl_k1_sequence"].total.item() == pytest.approx(-0.6)
    k3 = math.exp(0.1) - 1 - 0.1 + math.exp(0.5) - 1 - 0.5
    assert metrics["kl_k3_sequence"].total.item() == pytest.approx(k3)
    assert metrics["abs_log_ratio_max"].value.item() == 0.5


def test_gradient_agrees_with_finite_differences_of_the_sequence_objective():
    """Against equations 5 and 7 written out per sequence, without stop-gradient; no ratio is near a bound."""
    random = torch.Generator().manual_seed(0)
    offsets, mask = [0, 5, 6, 10], [True, True, False, True, True, True, False, True, True, True, False]
    advantages = [1.5, -0.7, -1.0]
    old = -torch.rand(11, generator=random, dtype=torch.float64)
    start = old + 0.3 * torch.randn(11, generator=random, dtype=torch.float64)

    def value(logp: Tensor) -> float:
        total = 0.0
        for i, advantage in enumerate(advantages):
            span = range(offsets[i], offsets[i + 1])
            log_ratio = [logp[t].item() - old[t].item() for t in span if mask[t]]
            s = math.exp(sum(log_ratio) / len(log_ratio))
            total += min(s * advantage, min(max(s, 0.9), 1.2) * advantage)
        return -total / 3

    logp = start.clone().requires_grad_()
    loss, _ = gspo(logp, old, mask, offsets, advantages)
    loss.backward()
    assert loss.item() == pytest.approx(value(start), rel=1e-14)
    h = 1e-6
    for t in range(11):
        step = zeros(11)
        step[t] = h
        assert logp.grad[t].item() == pytest.approx((value(start + step) - value(start - step)) / (2 * h), abs=1e-9)


@pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, 0.15), (-1.0, -0.15)])
def test_a_ratio_on_the_bound_keeps_its_gradient_and_one_ulp_beyond_loses_it(advantage: float, log_ratio: float):
    s = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
    for bound, clipped in ((s, False), (math.nextafter(s, 1.0), True)):
        margin = abs(bound - 1)  # exact, and so is 1 +- margin
        logp = leaf(log_ratio)
        loss, metrics = gspo(logp, zeros(1), [True], [0, 1], [advantage], clip_low=margin, clip_high=margin)
        loss.backward()
        assert loss.item() == -bound * advantage
        assert bool(metrics["clip_fraction_sequence"].total) == clipped
        assert logp.grad.item() == (0 if clipped else -s * advantage)


def test_advantage_zero_is_never_clipped():
    loss, metrics = gspo(leaf(5.0, -5.0), zeros(2), [True, True], [0, 1, 2], [0, 0])
    assert loss.item() == 0 and metrics["clip_fraction"].total == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_garbage_reaches_neither_value_nor_gradient(garbage: float):
    logp = leaf(0.1, garbage, garbage)
    loss, metrics = gspo(logp, torch.tensor([0, garbage, 0.0]).double(), [True, False, False], [0, 2], [1])
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert logp.grad.tolist() == pytest.approx([-math.exp(0.1), 0, 0])
    assert metrics["num_bad_sequences"].flagged == []


@pytest.mark.parametrize(
    ("new", "old"), [(math.nan, 0), (math.inf, 0), (0, math.nan), (0, math.inf), (0, -math.inf), (-math.inf, -math.inf)]
)
def test_bad_values_drop_their_sequence_and_name_its_row(new: float, old: float):
    logp = leaf(0.1, new, 0.05)
    rows = torch.tensor([3, 7])
    loss, metrics = gspo(logp, torch.tensor([0, old, 0]).double(), [True] * 3, [0, 2, 3], [1, 1], rows=rows)
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.05) / 2)  # N still counts the dropped sequence
    assert logp.grad.tolist() == pytest.approx([0, 0, -math.exp(0.05) / 2])
    assert metrics["num_bad_sequences"].flagged == [3]
    assert metrics["num_bad_sequences"].unpack("bad", metrics["num_bad_sequences"].pack(8)) == {
        "bad": 1,
        "bad/first_row": 3,
    }


@pytest.mark.parametrize(("advantage", "value"), [(1.0, 0.0), (-1.0, 0.9)])
def test_a_new_probability_of_zero_is_a_ratio_of_zero(advantage: float, value: float):
    logp = leaf(-math.inf, 0.0)
    loss, metrics = gspo(logp, zeros(2), [True, True], [0, 2], [advantage])
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert logp.grad.tolist() == [0, 0]
    assert metrics["num_bad_sequences"].flagged == [] and metrics["ratio"].values.tolist() == [0]


def test_sequences_without_trained_tokens_add_nothing():
    logp = leaf(0.1, 0.3, 0.4)
    loss, metrics = gspo(logp, zeros(3), [True, False, False], [0, 1, 3, 3], [1, 1, 1])
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1) / 3)
    assert logp.grad.tolist() == pytest.approx([-math.exp(0.1) / 3, 0, 0])
    assert metrics["ratio"].values.isnan().tolist() == [False, True, True]
    assert metrics["clip_fraction_sequence"].count == 1


@pytest.mark.parametrize("t", [0, 4])
def test_an_empty_micro_batch_yields_a_zero_that_can_be_differentiated(t: int):
    logp = torch.full((t,), math.nan, requires_grad=True)
    loss, metrics = gspo(logp, torch.zeros(t), [False] * t, [0], [])
    loss.backward()
    assert loss.item() == 0 and logp.grad is not None and not logp.grad.any()
    full = gspo(leaf(0.1), zeros(1), [True], [0, 1], [1])[1]
    assert {name: type(metric) for name, metric in metrics.items()} == {name: type(m) for name, m in full.items()}


def test_ratios_beyond_e_to_the_ten_stay_finite():
    logp = leaf(40.0, -40.0)
    loss, _ = gspo(logp, zeros(2), [True, True], [0, 1, 2], [-1, 1])
    loss.backward()
    assert loss.item() == pytest.approx((math.exp(40) - math.exp(-40)) / 2)
    assert logp.grad.tolist() == pytest.approx([math.exp(40) / 2, -math.exp(-40) / 2])


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"token tensors must all be \[t\] for one t.*'old_logp': \[3\]"):
        gspo(leaf(0.1, 0.2), zeros(3), [True, True], [0, 2], [1])
    with pytest.raises(ValueError, match=r"advantages must be \[m\] = \[1\] as offsets say, got \[2\]"):
        gspo(leaf(0.1, 0.2), zeros(2), [True, True], [0, 2], [1, 1])


@pytest.mark.parametrize("t", [0, 1, 255, 256, 257, 2000])
def test_segment_sum_over_piece_boundaries(t: int):
    """Against Python's exactly rounded sum, with empty segments and a tail that belongs to none."""
    random = torch.Generator().manual_seed(t)
    values = torch.randn(t, generator=random, dtype=torch.float64, requires_grad=True)
    offsets = [0, 0, t // 3, t // 3, t // 2, t - t // 10]
    got = segment_sum(values, torch.tensor(offsets))
    spans = list(pairwise(offsets))
    assert got.tolist() == pytest.approx([math.fsum(values[a:b].tolist()) for a, b in spans], rel=1e-13, abs=1e-14)
    (got * torch.arange(1.0, 6.0)).sum().backward()
    expected = zeros(t)
    for i, (a, b) in enumerate(spans):
        expected[a:b] = i + 1
    assert torch.equal(values.grad, expected)
