"""Variational Sequence-level Soft Policy Optimization (VESPO), arXiv 2602.10693."""

from __future__ import annotations

import torch

from megatron_gspo.objective.surrogate import Surrogate, choose, weighted_policy_gradient
from megatron_gspo.objective.tokens import MAX_LOG_RATIO, Ratios


def vespo(x: Ratios, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Surrogate:
    """sg[ phi(W_i) ] A_i log pi(y_t), to be averaged over all tokens.

        W_i    = prod_t pi(y_t) / pi_old(y_t), without length normalisation
        phi(W) = W^k exp( lambda (1 - W) ),   k, lambda by the sign of A_i;   phi(1) = 1

    A soft kernel instead of a clip: it vanishes both for W -> 0 and for W -> infinity.
    """
    log_w = x.spread((x.log_s * x.lens).clamp(max=MAX_LOG_RATIO))
    positive = x.advantages >= 0
    k, rate = choose(positive, k_pos, k_neg), choose(positive, lambda_pos, lambda_neg)
    weight = (k * log_w + rate * (1 - log_w.exp())).exp()
    return weighted_policy_gradient(weight, x, clipped=torch.zeros_like(x.used), log_ratio=log_w)
