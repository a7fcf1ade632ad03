from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.objective import ValueTokens, merge, reduce_metrics, value_loss
from tests.ranks import run_ranks


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(values, old_values, returns, mask=None, offsets=None, group=None) -> ValueTokens:
    offsets = torch.tensor(offsets or [0, len(values)])
    mask = torch.ones(len(values), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return ValueTokens(
        values=values,
        old_values=old_values,
        returns=returns,
        mask=mask,
        offsets=offsets,
        rows=torch.arange(len(offsets) - 1),
        group=group,
    )


def reported(metrics) -> dict[str, float]:
    return reduce_metrics(metrics, dp_cp_group=None, dp_group=None, device="cpu")


def test_by_hand():
    """Values 1, 2, 0.25, 3 may move from 0 by 1/2 towards returns of 0, 3, 1, -1; T is 8.

    Clipped to 0.5, 0.5, 0.25, 0.5. Squares: 1 against 0.25; 1 against 6.25, cut off; 0.5625 both; 16 against 2.25.
    """
    values = f64(1, 2, 0.25, 3).requires_grad_()
    loss, metrics = value_loss(tokens(values, f64(0, 0, 0, 0), f64(0, 3, 1, -1)), num_tokens=8, clip=0.5)
    loss.backward()
    assert loss.item() == metrics["loss"].total.item() == (1 + 6.25 + 0.5625 + 16) / 16
    assert values.grad.tolist() == [1 / 8, 0, -0.75 / 8, 4 / 8]
    found = reported(metrics)
    assert found["clip_fraction"] == 0.25 and found["value"] == 6.25 / 4 and found["return"] == 0.75
    # R = 0, 3, 1, -1 has mean 3/4 and 4 Var = 8.75; R - V = -1, 1, 0.75, -4 has mean -13/16 and 4 Var = 15.921875
    assert found["explained_variance"] == pytest.approx(1 - 15.921875 / 8.75, abs=1e-14)


def test_without_clipping():
    values = f64(1, 2).requires_grad_()
    loss, metrics = value_loss(tokens(values, f64(-9, 9), f64(0, 3)), num_tokens=2, clip=None)
    loss.backward()
    assert loss.item() == 0.5 and values.grad.tolist() == [0.5, -0.5]
    assert reported(metrics)["clip_fraction"] == 0


def test_gradient_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))
    values = (old + 0.5 * values).requires_grad_()

    def loss(at: torch.Tensor) -> torch.Tensor:
        return value_loss(tokens(at, old, returns), num_tokens=150, clip=0.3)[0]

    loss(values).backward()
    step = 1e-6
    for t in range(len(values)):
        there, back = values.detach().clone(), values.detach().clone()
        there[t] += step
        back[t] -= step
        slope = (loss(there) - loss(back)).item() / (2 * step)
        assert values.grad[t].item() == pytest.approx(slope, abs=1e-8)


def test_rounding_within_the_range_cuts_no_slope_off():
    """0.7 + (0.1 - 0.7) is not 0.1 in floating point: the clipped square is larger than the other by some ulps."""
    values, old = f64(0.1).requires_grad_(), f64(0.7)
    assert (old + (values - old)).item() != 0.1
    for target in (5.0, -5.0):
        loss, metrics = value_loss(tokens(values, old, f64(target)), num_tokens=1, clip=0.75)
        (slope,) = torch.autograd.grad(loss, values)
        assert slope.item() == 0.1 - target and reported(metrics)["clip_fraction"] == 0


@pytest.mark.parametrize("field", ["values", "old_values", "returns"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_bad_values_are_reported_and_never_used(field: str, garbage: float):
    """Garbage at a masked token is nothing; at a trained one its whole sequence, the second, is left out."""
    sides = {"values": f64(1, 1, 1, 1, 9), "old_values": f64(0, 0, 0, 0, 9), "returns": f64(0, 0, 0, 0, 9)}
    sides[field][[1, 4]] = garbage
    mask = [True, False, True, True, False]
    values = sides["values"].requires_grad_()
    loss, metrics = value_loss(tokens(**sides, mask=mask, offsets=[0, 2, 4]), num_tokens=2, clip=0.5)
    assert loss.item() == (1 + 1 + 1) / 4 and reported(metrics)["num_bad_sequences"] == 0
    with torch.no_grad():
        sides[field][2] = garbage
    loss, metrics = value_loss(tokens(**sides, mask=mask, offsets=[0, 2, 4]), num_tokens=2, clip=0.5)
    loss.backward()
    assert loss.item() == 1 / 4 and values.grad.tolist() == [0.5, 0, 0, 0, 0]
    found = reported(metrics)
    assert found["num_bad_sequences"] == 1 and found["num_bad_sequences/first_row"] == 1
    assert found["value"] == 1 and found["return"] == 0


def test_parts_add_up():
    """Two micro-batches of a mini-batch and one without rows report what the mini-batch does in one piece."""
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3)]

    def part(start: int, end: int, offsets: list[int], first_row: int) -> tuple[torch.Tensor, dict]:
        cut = [side[start:end] for side in sides]
        rows = torch.arange(first_row, first_row + len(offsets) - 1)
        mask = torch.ones(end - start, dtype=torch.bool)
        return value_loss(ValueTokens(*cut, mask, torch.tensor(offsets), rows, None), num_tokens=12, clip=0.4)

    whole, expected = part(0, 12, [0, 5, 12], 0)
    parts = [part(0, 5, [0, 5], 0), part(5, 12, [0, 7], 1), part(0, 0, [0], 0)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-15)
    assert reported(merge([metrics for _, metrics in parts])) == pytest.approx(reported(expected), abs=1e-14)


def test_explained_variance_of_right_constant_and_no_values():
    returns = f64(1, 2, 4)

    def explained(values: torch.Tensor, returns: torch.Tensor = returns, mask=None) -> float:
        return reported(value_loss(tokens(values, values, returns, mask=mask), num_tokens=3, clip=0.2)[1])[
            "explained_variance"
        ]

    assert explained(returns) == 1
    assert explained(f64(5, 5, 5)) == pytest.approx(0, abs=1e-15)
    assert explained(f64(1, 2, 3), returns=f64(0.1, 0.1, 0.1)) == 0
    assert explained(returns, mask=[False] * 3) == 0


def test_a_bad_value_on_one_context_parallel_rank_counts_on_all():
    """Each of two ranks holds two tokens of both sequences; the first rank's part of the first sequence is bad."""

    def share() -> tuple[float, list[float], float]:
        import torch.distributed as dist

        values = f64(1, 1, 1, 1)
        if dist.get_rank() == 0:
            values[1] = math.nan
        values.requires_grad_()
        part = tokens(values, f64(1, 1, 1, 1), f64(0, 0, 0, 0), offsets=[0, 2, 4], group=dist.group.WORLD)
        loss, metrics = value_loss(part, num_tokens=4, clip=0.5)
        loss.backward()
        dp = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        found = reduce_metrics(metrics, dp_cp_group=dist.group.WORLD, dp_group=dp, device="cpu")
        return loss.item(), values.grad.tolist(), found["num_bad_sequences"]

    assert run_ranks(2, share) == [(0.25, [0, 0, 0.25, 0.25], 1)] * 2


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"one element per token, \[2\], got \{'returns': \[1\]\}"):
        tokens(f64(1, 2), f64(1, 2), f64(1))
