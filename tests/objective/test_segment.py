from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from megatron_gspo.objective.segment import segment_sum


@pytest.mark.parametrize("t", [0, 1, 255, 256, 257, 2000])
def test_over_piece_boundaries(t: int):
    """Against Python's exactly rounded sum, with empty segments and a tail that belongs to none."""
    random = torch.Generator().manual_seed(t)
    values = torch.randn(t, generator=random, dtype=torch.float64, requires_grad=True)
    offsets = [0, 0, t // 3, t // 3, t // 2, t - t // 10]
    got = segment_sum(values, torch.tensor(offsets))
    spans = list(pairwise(offsets))
    assert got.tolist() == pytest.approx([math.fsum(values[a:b].tolist()) for a, b in spans], rel=1e-13, abs=1e-14)
    (got * torch.arange(1.0, 6.0)).sum().backward()
    expected = torch.zeros(t, dtype=torch.float64)
    for i, (a, b) in enumerate(spans):
        expected[a:b] = i + 1
    assert torch.equal(values.grad, expected)


def test_a_nan_stays_in_its_segment():
    values = torch.tensor([1.0, torch.nan, 2.0, 3.0, torch.nan], dtype=torch.float64)
    got = segment_sum(values, torch.tensor([0, 2, 4]))
    assert got[0].isnan() and got[1] == 5


def test_halves_that_cancel():
    """50,000 values of +-8 around 3.5e-4: the sum is 17.5 beside halves of 2e5.

    A sum of 256 in a piece and one of 196 pieces round (256 + 196) times, each by 2^-53 of at most 4e5 in all. Divided
    by 50,000 that is 4e-13 of a mean log-ratio.
    """
    values = torch.full((50_000,), 3.5e-4, dtype=torch.float64)
    values[:25_000] += 8
    values[25_000:] -= 8
    got = segment_sum(values, torch.tensor([0, 50_000])).item()
    assert got == pytest.approx(math.fsum(values.tolist()), rel=0, abs=(256 + 196) * 2**-53 * 4e5)
