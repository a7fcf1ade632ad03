"""The family against the oracle in float64: values, ratios, clip fractions, gradients and advantages to 1e-12."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_gspo.objective import group_relative, leave_one_out, merge
from tests.objective.family import ORACLE
from tests.objective.oracle import Case, cases, numbers
from tests.objective.packed import packed_loss

CASES = cases()
every_pair = pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(c, name, id=f"{c.id}-{name}") for c in CASES.values() for name in ORACLE if name in c.expected],
)
GARBAGE = (torch.nan, torch.inf, -torch.inf)


def padded(case: Case) -> Case:
    """Every row behind 2 and before as many masked tokens of garbage as make all rows one length."""
    longest = max(row.numel() for row in case.new)

    def pad(row: Tensor, shift: int, values: tuple[float, ...] = GARBAGE) -> Tensor:
        filler = [values[(k + shift) % len(values)] for k in range(2 + longest - row.numel())]
        return torch.cat([row.new_tensor(filler[:2]), row, row.new_tensor(filler[2:])])

    return replace(
        case,
        new=[pad(row, 0) for row in case.new],
        old=[pad(row, 1) for row in case.old],
        mask=[pad(row, 0, (False,)) for row in case.mask],
        token_advantages=None if case.token_advantages is None else [pad(row, 2) for row in case.token_advantages],
    )


@every_pair
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_value_gradient_and_metrics(case: Case, name: str, layout: str):
    expected, bad = case.expected[name], case.expected["must_detect_rows"]
    result = packed_loss(padded(case) if layout == "padded" else case, name)
    gradient = result.gradient
    if layout == "padded":
        gradient = [row[2 : 2 + new.numel()] for row, new in zip(result.gradient, case.new, strict=True)]
    reported = result.reported
    assert result.loss == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)
    assert reported["loss"] == result.loss
    check_gradient(case, name, gradient)
    assert sum(row.count_nonzero() for row in gradient) == result.flat.count_nonzero()
    assert reported["clip_fraction"] == pytest.approx(
        expected.get("clipfrac_tok", reported["clip_fraction"]), abs=1e-15
    )
    assert result.bad_rows == bad
    assert reported["num_bad_sequences"] == len(bad)

    used = torch.tensor([n > 0 and i not in bad for i, n in enumerate(case.trained_lens.tolist())])
    got, ratio = result.metrics["ratio"].values, numbers(case.expected["seq_ratio"])
    torch.testing.assert_close(got[used], ratio[used], rtol=1e-12, atol=0)
    assert got[~used].isnan().all()


def check_gradient(case: Case, name: str, gradient: list[Tensor]) -> None:
    expected = case.expected[name]
    for i, row in enumerate(gradient):
        n = row.numel()
        if "grad" in expected:
            got, want = row, numbers(expected["grad"][i])[:n]
        else:
            got = torch.cat([row[[0, n // 2, n - 1]], row.sum()[None]])
            want = numbers([*expected["grad_probe"][i], expected["grad_row_sum"][i]])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_clip_fraction_of_sequences(case: Case):
    reported = packed_loss(case, "gspo").reported
    assert reported["clip_fraction_sequence"] == pytest.approx(case.expected["gspo"]["clipfrac_seq"], abs=1e-15)


@every_pair
def test_every_row_alone_gives_its_share(case: Case, name: str):
    for i, share in enumerate(case.expected[name]["per_seq_loss"]):
        dropped = i in case.expected["must_detect_rows"] or not case.trained_lens[i]
        want = 0.0 if dropped else float(share)
        assert packed_loss(case, name, [i]).loss == pytest.approx(want, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", [name for name in ORACLE if name != "gspo_token"])
@pytest.mark.parametrize("cut", [[[0, 1], [2], [3, 4, 5, 6], [7]], [[7, 0, 3], [], [5, 1, 2, 6, 4]]])
def test_micro_batches_add_up(name: str, cut: list[list[int]]):
    """Losses to the rounding of a sum of eight numbers below 1, gradients bit for bit."""
    case = CASES["c37_micro_batches"]
    whole = packed_loss(case, name)
    parts = [packed_loss(case, name, rows) for rows in cut]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, abs=8 * 2**-53)
    for rows, part in zip(cut, parts, strict=True):
        for row, piece in zip(rows, part.gradient, strict=True):
            assert torch.equal(piece, whole.gradient[row])
    merged = replace(whole, metrics=merge([part.metrics for part in parts]))
    assert merged.reported == pytest.approx(whole.reported, rel=1e-13, abs=8 * 2**-53)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "advantages_alt" in case.expected])
def test_advantages(name: str):
    """The estimators' ddof is 1, and a group of one has advantage 0: the oracle's other conventions do not apply."""
    case = CASES[name]
    alternative = case.expected["advantages_alt"]
    for eps, expected in (
        (1e-6, case.expected["advantages"]),
        (1e-4, alternative["ddof1_eps1e-4"]),
        (0.0, alternative["ddof1_eps0"]),
    ):
        got = group_relative(case.rewards, case.group, normalize_std=True, eps=eps)
        torch.testing.assert_close(got, numbers(expected), rtol=1e-12, atol=1e-12)

    centred = numbers(alternative["dr_grpo"])
    got = group_relative(case.rewards, case.group, normalize_std=False, eps=0.0)
    torch.testing.assert_close(got, centred, rtol=1e-12, atol=1e-12)
    size = (case.group[:, None] == case.group).sum(1).double()
    expected = centred * size / (size - 1).clamp(min=1)
    torch.testing.assert_close(leave_one_out(case.rewards, case.group), expected, rtol=1e-12, atol=1e-12)
