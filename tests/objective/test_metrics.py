from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.objective import merge, reduce_metrics
from megatron_gspo.objective.metrics import (
    EffectiveSampleSize,
    Max,
    Metric,
    Min,
    SequenceFlags,
    SequenceValues,
    Sum,
    TokenMean,
    TokenQuantiles,
)
from tests.ranks import run_ranks


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scalar(value: float) -> torch.Tensor:
    return f64(value)[0]


def alone(metrics: dict[str, Metric]) -> dict[str, float]:
    return reduce_metrics(metrics, dp_cp_group=None, dp_group=None, device="cpu")


def micro_batch(rows: list[int], values: list[float]) -> dict[str, Metric]:
    """Each metric type over the same values, one per row; the last row is flagged."""
    v, r = f64(*values), torch.tensor(rows, dtype=torch.int64)
    count = scalar(len(rows))
    return {
        "sum": Sum(v.sum()),
        "token_mean": TokenMean(v.sum(), count),
        "ess": EffectiveSampleSize.of(v.exp2(), torch.ones_like(v)),
        "max": Max(torch.cat([v, f64(-math.inf)]).amax()),
        "min": Min(torch.cat([v, f64(math.inf)]).amin()),
        "quantiles": TokenQuantiles(v.bfloat16(), scalar(0)),
        "values": SequenceValues(r, v),
        "flags": SequenceFlags(r, torch.arange(len(rows)) == len(rows) - 1),
    }


def test_micro_batches_merge():
    got = alone(merge([micro_batch([2, 0], [4, -1]), micro_batch([], []), micro_batch([5], [6])]))
    assert got == {
        "sum": 9,
        "token_mean": 3,
        "ess": pytest.approx((16 + 0.5 + 64) ** 2 / (3 * (256 + 0.25 + 4096))),  # weights 2^4, 2^-1, 2^6
        "max": 6,
        "min": -1,
        "quantiles_p01": -1,
        "quantiles_p99": 6,
        "values/mean": 3,
        "values/min": -1,
        "values/p01": pytest.approx(-1 + 0.02 * 5),  # -1, 4, 6 at quantiles 0, 0.5, 1
        "values/p99": pytest.approx(6 - 0.02 * 2),
        "values/max": 6,
        "flags": 2,
        "flags/first_row": 0,
    }


def test_nothing_to_measure():
    got = alone(micro_batch([], []))
    assert {name: got[name] for name in ("sum", "token_mean", "ess", "flags")} == {
        "sum": 0,
        "ess": 0,
        "token_mean": 0,
        "flags": 0,
    }
    assert all(math.isnan(got[name]) for name in ("max", "min", "quantiles_p01", "values/mean", "values/min"))
    assert merge([]) == {} and alone({}) == {}


def test_what_is_not_used_is_no_value_and_infinity_is_one():
    assert alone({"max": Max(scalar(math.inf)), "min": Min(scalar(-math.inf))}) == {"max": math.inf, "min": -math.inf}
    got = alone({"v": SequenceValues(torch.tensor([0, 1]), f64(math.nan, 3))})
    assert got["v/mean"] == got["v/min"] == 3


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([3, 3, 3, 3], 1),
        ([0, 0, 5, 0], 1 / 4),
        ([1, 3], (1 + 3) ** 2 / (2 * (1 + 9))),
        ([0, 0], 0),
        ([1e300, 1e300], 1),  # squares beyond float64
        ([math.inf, 0], 1 / 2),
    ],
)
def test_effective_sample_size(weights: list[float], expected: float):
    """(sum w)^2 / (n sum w^2); what is not used counts neither as a weight nor as one of the n."""
    got = alone({"ess": EffectiveSampleSize.of(f64(*weights, math.nan), f64(*[1] * len(weights), 0))})
    assert got == {"ess": pytest.approx(expected, rel=1e-15)}


def test_effective_sample_size_of_weights_that_tokens_share():
    got = alone({"ess": EffectiveSampleSize.of(f64(2, 1), f64(3, 1))})
    assert got == {"ess": (2 + 2 + 2 + 1) ** 2 / (4 * (4 + 4 + 4 + 1))}


def quantiles(values: torch.Tensor, not_used: int = 0) -> list[float]:
    got = alone({"x": TokenQuantiles(values.bfloat16(), scalar(not_used))})
    return [got["x_p01"], got["x_p99"]]


def test_quantiles_of_tokens():
    """Of 200 values, the least that 2 of them, and that 198 of them, are not above: halves are bfloat16 numbers."""
    values = torch.arange(-99, 101) / 2
    assert quantiles(values) == [-49, 49]
    assert quantiles(torch.cat([values, torch.zeros(77)]), not_used=77) == [-49, 49]
    assert quantiles(f64(-math.inf, 1)) == [-math.inf, 1]
    assert quantiles(f64(0, 0, 0), not_used=2) == [0, 0]


def test_quantiles_of_tokens_are_off_by_their_rounding_only():
    values = 0.1 * torch.randn(30_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = values.quantile(f64(0.01, 0.99), interpolation="lower").tolist()
    assert quantiles(values) == pytest.approx(exact, rel=1 / 256)
    parts = [{"x": TokenQuantiles(part.bfloat16(), scalar(0))} for part in values.flip(0).split(7_000)]
    assert list(alone(merge(parts)).values()) == quantiles(values)


def test_a_row_given_twice_is_found_out():
    twice = merge([micro_batch([1], [1.0]), micro_batch([1], [2.0])])
    with pytest.raises(AssertionError, match=r"values: rows \[1\] were given twice"):
        alone(twice)


def test_micro_batches_must_have_the_same_metrics():
    with pytest.raises(AssertionError, match=r"micro-batches differ in metrics: \['b'\], \['a'\]"):
        merge([{"a": Sum(scalar(1))}, {"b": Sum(scalar(1))}])


def _reduce_on_two_by_two() -> dict[str, float]:
    """dp 2 x cp 2. DP rank 0 holds rows 0 and 3 with values 1 and 2, DP rank 1 row 4 with value 9.

    CP ranks hold half of the token sums each, and all of the sequence metrics.
    """
    rank = dist.get_rank()
    dp_rank, cp_rank = divmod(rank, 2)
    dp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    metrics = micro_batch([0, 3], [1, 2]) if dp_rank == 0 else micro_batch([4], [9])
    half = EffectiveSampleSize.of(f64(1 + rank), f64(1))
    quarter = TokenQuantiles(f64(rank).bfloat16(), scalar(0))
    tokens = {"sum": Sum(metrics["sum"].total / 2), "token_mean": TokenMean(scalar(1 + rank), scalar(2)), "ess": half}
    tokens["quantiles"] = quarter
    metrics = dict(reversed({**metrics, **tokens}.items())) if rank == 3 else {**metrics, **tokens}
    return reduce_metrics(metrics, dp_cp_group=dist.group.WORLD, dp_group=dp_groups[cp_rank], device="cpu")


def test_ranks_reduce_by_type_and_agree():
    first, *others = run_ranks(4, _reduce_on_two_by_two)
    assert all(other == first for other in others)
    assert first["sum"] == 12  # (3 + 9) once, although two CP ranks gave halves
    assert first["token_mean"] == (1 + 2 + 3 + 4) / 8
    assert first["ess"] == pytest.approx((1 + 2 + 3 + 4) ** 2 / (4 * (1 + 4 + 9 + 16)), rel=1e-15)
    assert (first["quantiles_p01"], first["quantiles_p99"]) == (0, 3)
    assert (first["max"], first["min"]) == (9, 1)
    assert (first["values/mean"], first["values/min"], first["values/max"]) == (4, 1, 9)
    assert (first["flags"], first["flags/first_row"]) == (2, 3)


def _reduce_different_metrics() -> None:
    name = "a" if dist.get_rank() == 0 else "b"
    reduce_metrics({name: Sum(scalar(1))}, dp_cp_group=dist.group.WORLD, dp_group=None, device="cpu")


def test_ranks_with_different_metrics_fail_instead_of_hanging():
    with pytest.raises(AssertionError, match="ranks hold different metrics and cannot reduce them"):
        run_ranks(2, _reduce_different_metrics, timeout_s=20)
