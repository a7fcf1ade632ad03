"""Geometric-Mean Policy Optimization (GMPO), arXiv 2507.20673."""

from __future__ import annotations

import torch

from megatron_gspo.objective.surrogate import Surrogate, choose
from megatron_gspo.objective.tokens import Ratios


def gmpo(x: Ratios, *, clip_low: float, clip_high: float) -> Surrogate:
    """A_i g_i for every token of sequence i, to be averaged over tokens, then over sequences (eq. 4).

        g_i = exp( (1/|y_i|) sum_t c_t ),   c_t = log r_t, clipped at clip_high where A_i > 0 and at -clip_low else

    Bounds are those of log r_t (paper: 0.4 and 0.4), on the side that lowers the objective only. The slope of a token
    is that of the sequence, 0 where c_t is clipped. Costs a second all-reduce of [m] float64, for the sum of c_t.
    """
    upper = choose(x.advantages > 0, clip_high, torch.inf)
    lower = choose(x.advantages < 0, -clip_low, -torch.inf)
    bounded = torch.minimum(torch.maximum(x.log_ratio, lower), upper)
    value = x.spread(x.sequence_mean(bounded)).exp() * x.advantages
    is_clipped = bounded != x.log_ratio
    return Surrogate(value=value, slope=value.masked_fill(is_clipped, 0.0), clipped=is_clipped, log_ratio=x.log_ratio)
