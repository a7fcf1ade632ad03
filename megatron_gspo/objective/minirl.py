"""MiniRL, arXiv 2512.01374: the token-level first-order approximation of the sequence-level objective."""

from __future__ import annotations

import torch

from megatron_gspo.objective.surrogate import Surrogate, weighted_policy_gradient
from megatron_gspo.objective.tokens import Ratios


def minirl(x: Ratios, *, clip_low: float, clip_high: float, max_weight: float) -> Surrogate:
    """sg[ M_t min( pi(y_t) / mu(y_t), max_weight ) ] A_t log pi(y_t), summed over tokens, averaged over sequences.

        M_t = 0 where A_t > 0 and r_t > 1 + clip_high, or A_t < 0 and r_t < 1 - clip_low;  else 1
        r_t = pi(y_t) / pi_old(y_t);   mu: the rollout engine's policy

    Needs the gap: pi / mu = (pi / pi_old) (pi_old / mu), the policy's staleness times the engines' difference.
    """
    r = x.log_ratio.exp()
    beyond = torch.where(x.advantages > 0, r > 1 + clip_high, r < 1 - clip_low) & (x.advantages != 0)
    weight = (x.log_ratio + x.log_gap).exp().clamp(max=max_weight).masked_fill(beyond, 0.0)
    return weighted_policy_gradient(weight, x, clipped=beyond, log_ratio=x.log_ratio)
