"""Clipped Importance Sampling Policy Optimization (CISPO), arXiv 2506.13585."""

from __future__ import annotations

from megatron_gspo.objective.surrogate import Surrogate, weighted_policy_gradient
from megatron_gspo.objective.tokens import Ratios


def cispo(x: Ratios, *, clip_high: float) -> Surrogate:
    """sg[ min(r_t, 1 + clip_high) ] A_t log pi(y_t), to be averaged over all tokens (eq. 4 and 5, no lower bound).

    The weight is clipped, never the gradient: `clipped` marks tokens whose weight was.
    """
    r = x.log_ratio.exp()
    is_clipped = (r > 1 + clip_high) & (x.advantages != 0)
    return weighted_policy_gradient(r.clamp(max=1 + clip_high), x, clipped=is_clipped, log_ratio=x.log_ratio)
