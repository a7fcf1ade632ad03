"""Exact sums over packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 256


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """[m]: sum of values[offsets[i] : offsets[i+1]] for each i, 0 for an empty one. values [t], offsets [m+1] int64.

    Sums pieces of at most `_PIECE` tokens, then pieces: one running sum over 50,000 tokens would lose four digits.
    """
    pieces = torch.arange(0, values.numel() + _PIECE, _PIECE, device=offsets.device).clamp(max=values.numel())
    cuts = torch.cat([offsets, pieces]).sort().values
    piece_sums = torch.segment_reduce(values, "sum", offsets=cuts, unsafe=True)
    ends = torch.searchsorted(cuts, torch.cat([offsets, cuts[-1:]]))
    return torch.segment_reduce(piece_sums, "sum", offsets=ends, unsafe=True)[:-1]
