"""Soft Adaptive Policy Optimization (SAPO), arXiv 2511.20347."""

from __future__ import annotations

import torch

from megatron_gspo.objective.surrogate import Surrogate, choose
from megatron_gspo.objective.tokens import Ratios


def sapo(x: Ratios, *, tau_pos: float, tau_neg: float) -> Surrogate:
    """f(r_t) A_t, to be averaged over tokens, then over sequences (eq. 5): a gate instead of a clip.

    f(r)  = sigmoid( tau (r - 1) ) 4 / tau,   tau = tau_pos where A > 0, else tau_neg       (eq. 6)
    f'(r) = 4 p (1 - p),   p = sigmoid( tau (r - 1) )                                       (eq. 7)
    """
    r = x.log_ratio.exp()
    tau = choose(x.advantages > 0, tau_pos, tau_neg)
    gate = tau * (r - 1)
    slope = 4 * gate.sigmoid() * (-gate).sigmoid() * r
    return Surrogate(
        value=gate.sigmoid() * 4 / tau * x.advantages,
        slope=slope * x.advantages,
        clipped=torch.zeros_like(x.used),
        log_ratio=x.log_ratio,
    )
