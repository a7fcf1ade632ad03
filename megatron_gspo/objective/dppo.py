"""Divergence Proximal Policy Optimization (DPPO), arXiv 2602.04879."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objective.surrogate import Surrogate, weighted_policy_gradient
from megatron_gspo.objective.tokens import Ratios


def dppo(x: Ratios, *, divergence: str, threshold: float, max_ratio: float) -> Surrogate:
    """sg[ M_t min(r_t, max_ratio) ] A_t log pi(y_t), to be averaged over all tokens (eq. 12).

        r_t = pi(y_t) / mu(y_t),   mu: the rollout engine's policy, which takes the place of pi_old here
        M_t = 0 where D_t > threshold and the step leads away: A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1; else 1
        D_t = | pi - mu |                                            (divergence "tv")
        D_t = mu log(mu / pi) + (1 - mu) log( (1 - mu) / (1 - pi) )    (divergence "kl")

    both of the two-way distribution {y_t, anything else}.
    """
    r = x.log_ratio.exp()
    away = torch.where(x.advantages > 0, r > 1, r < 1) & (x.advantages != 0)
    is_masked = away & (_DIVERGENCES[divergence](x) > threshold)
    weight = r.clamp(max=max_ratio).masked_fill(is_masked, 0.0)
    return weighted_policy_gradient(weight, x, clipped=is_masked, log_ratio=x.log_ratio)


def _total_variation(x: Ratios) -> Tensor:
    return (x.logp.exp() - x.old_logp.exp()).abs()


def _kl(x: Ratios) -> Tensor:
    # Rounding may leave a probability above 1.
    mu, pi = x.old_logp.exp(), x.logp.exp().clamp(max=1.0)
    rest = torch.log1p(-mu) - torch.log1p(-pi)
    return -mu * x.log_ratio + torch.where(mu < 1, (1 - mu) * rest, 0.0)


_DIVERGENCES = {"tv": _total_variation, "kl": _kl}
