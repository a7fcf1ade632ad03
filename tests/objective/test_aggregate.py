from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_gspo.objective import Totals, clipped_tokens, token_weights
from tests.objective.family import Member
from tests.objective.packed import evaluate, tokens_of

# Sequences of 1, 4 and 0 trained tokens in a mini-batch that holds more of them elsewhere.
LENS = torch.tensor([1, 4, 0])
TOTALS = Totals(num_sequences=5, num_tokens=20, max_tokens=10)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [1 / 5, 1 / 20, 1 / 5]),
        ("token_mean", [1 / 20] * 3),
        ("sequence_sum", [1 / 5] * 3),
        ("constant", [1 / 50] * 3),
    ],
)
def test_weights(aggregation: str, expected: list[float]):
    weights = token_weights(aggregation, LENS, TOTALS)
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", -(2 + 1) / 2),
        ("token_mean", -(2 + 4) / 5),
        ("sequence_sum", -(2 + 4) / 2),
        ("constant", -(2 + 4) / 16),
    ],
)
def test_a_loss_by_hand(aggregation: str, expected: float):
    """Ratios of 1, A = 2 over one token and A = 1 over four; N = 2, T = 5, L = 8."""
    tokens = tokens_of([[0.0], [0.0] * 4], advantages=[2, 1])
    member = Member(partial(clipped_tokens, clip_low=0.2, clip_high=0.2), aggregation)
    totals = Totals(num_sequences=2, num_tokens=5, max_tokens=8)
    assert evaluate(tokens, member, totals).loss == pytest.approx(expected, rel=1e-15)


def test_a_mini_batch_without_trained_tokens_has_finite_weights():
    nothing = Totals(num_sequences=2, num_tokens=0, max_tokens=8)
    for aggregation in ("sequence_mean", "token_mean", "sequence_sum", "constant"):
        assert token_weights(aggregation, torch.tensor([0, 0]), nothing).isfinite().all()


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation is 'mean'; expected sequence_mean, token_mean, sequence_sum or"):
        token_weights("mean", LENS, TOTALS)
