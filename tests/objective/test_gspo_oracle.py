"""GSPO against the oracle: value, ratios, clip fractions, gradients; in float64, and in float32 to its rounding."""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.objective import merge, reduce_metrics
from tests.objective.oracle import Case, cases, numbers
from tests.objective.packed import packed_loss

every_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases().items()])


def reported(metrics) -> dict[str, float]:
    return reduce_metrics(metrics, dp_cp_group=None, dp_group=None, device="cpu")


def check_gradient(case: Case, gradient, *, rtol: float, atol: float, skip: frozenset[int] = frozenset()) -> None:
    expected = case.expected["gspo"]
    for i, row in enumerate(gradient):
        if i in skip:
            continue
        if "grad" in expected:
            torch.testing.assert_close(row, numbers(expected["grad"][i])[: row.numel()], rtol=rtol, atol=atol)
        else:
            first, middle, last = expected["grad_probe"][i]
            n = row.numel()
            probes = row[[0, n // 2, n - 1]]
            torch.testing.assert_close(probes, numbers([first, middle, last]), rtol=rtol, atol=atol)
            total = torch.tensor(expected["grad_row_sum"][i], dtype=torch.float64)
            torch.testing.assert_close(row.sum(), total, rtol=rtol, atol=atol * n)


@every_case
def test_float64_is_exact(case: Case):
    loss, gradient, metrics = packed_loss(case)
    expected, result = case.expected["gspo"], reported(metrics)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)
    assert result["loss"] == loss.item()
    check_gradient(case, gradient, rtol=1e-12, atol=1e-14)
    assert result["clip_fraction"] == pytest.approx(expected["clipfrac_tok"], abs=1e-15)
    assert result["clip_fraction_sequence"] == pytest.approx(expected["clipfrac_seq"], abs=1e-15)
    bad = case.expected["must_detect_rows"]
    assert metrics["num_bad_sequences"].flagged == bad
    assert result["num_bad_sequences"] == len(bad)

    used = torch.tensor([n > 0 and i not in bad for i, n in enumerate(case.trained_lens.tolist())])
    ratio = numbers(case.expected["seq_ratio"])
    torch.testing.assert_close(metrics["ratio"].values[used], ratio[used], rtol=1e-12, atol=0)
    assert metrics["ratio"].values[~used].isnan().all()


@every_case
def test_float32_is_off_by_the_rounding_of_its_inputs_alone(case: Case):
    """Rounding a log-probability x to float32 moves it by up to |x| 2^-24, so log s by up to 2 max|x| 2^-24 = delta.

    Nothing else is in float32 but the gradient that comes out. A row whose ratio lies within s delta of a bound may
    fall on the other side of it: its gradient is not determined, its value is (the surrogate is continuous).
    """
    loss, gradient, _ = packed_loss(case, dtype=torch.float32)
    s = numbers(case.expected["seq_ratio"]).nan_to_num(1.0)
    largest = max(
        torch.cat([new[mask], old[mask], new.new_zeros(1)]).nan_to_num(0, 0, 0).abs().max().item()
        for new, old, mask in zip(case.new, case.old, case.mask, strict=True)
    )
    delta = 2 * largest * 2**-24
    bounds = (1 - case.clip["clip_low"], 1 + case.clip["clip_high"])
    ambiguous = frozenset(i for i, x in enumerate(s.tolist()) if min(abs(x - b) for b in bounds) <= x * delta)
    tolerance = (s * case.advantages.abs()).sum().item() * delta / case.n
    assert loss.item() == pytest.approx(case.expected["gspo"]["loss"], abs=tolerance + 1e-15)
    check_gradient(case, gradient, rtol=delta + 2**-23, atol=1e-14, skip=ambiguous)


@pytest.mark.parametrize("cut", [[[0, 1], [2], [3, 4, 5, 6], [7]], [[7, 0, 3], [], [5, 1, 2, 6, 4]]])
def test_micro_batches_add_up(cut: list[list[int]]):
    case = cases()["c37_micro_batches"]
    whole, gradient, metrics = packed_loss(case)
    parts = [packed_loss(case, rows) for rows in cut]
    assert sum(part[0] for part in parts).item() == pytest.approx(whole.item(), abs=1e-16)
    for rows, (_, pieces, _) in zip(cut, parts, strict=True):
        for row, piece in zip(rows, pieces, strict=True):
            assert torch.equal(piece, gradient[row])
    assert reported(merge([part[2] for part in parts])) == pytest.approx(reported(metrics), rel=1e-14)
