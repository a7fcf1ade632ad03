"""Loss aggregation: how the terms of tokens add up. It is part of an objective's definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of a whole mini-batch, over all micro-batches and ranks, fixed before it is cut.

    num_sequences: N, those without trained tokens included. num_tokens: T = sum_i |y_i|. max_tokens: L, the longest
    response that sampling allows.
    """

    num_sequences: int
    num_tokens: int
    max_tokens: int


def token_weights(aggregation: str, lens: Tensor, totals: Totals) -> Tensor:
    """[m] float64: the weight of every token of each sequence, from lens [m] int64, |y_i| over all CP ranks.

    sequence_mean:  (1/N) sum_i (1/|y_i|) sum_t J_it     mean over sequences of their token means (GRPO, GSPO)
    token_mean:     (1/T) sum_i sum_t J_it               mean over the tokens of the mini-batch (DAPO)
    sequence_sum:   (1/N) sum_i sum_t J_it               mean over sequences of their token sums (MiniRL)
    constant:       (1/N) sum_i (1/L) sum_t J_it         the same divisor for every sequence (Dr.GRPO)
    """
    ones = torch.ones_like(lens, dtype=torch.float64)
    match aggregation:
        case "sequence_mean":
            return ones / (totals.num_sequences * lens.clamp(min=1))
        case "token_mean":
            return ones / max(totals.num_tokens, 1)
        case "sequence_sum":
            return ones / totals.num_sequences
        case "constant":
            return ones / (totals.num_sequences * totals.max_tokens)
    raise ValueError(f"aggregation is {aggregation!r}; expected sequence_mean, token_mean, sequence_sum or constant")
