"""The KL penalty to a reference policy, for any objective that takes ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objective.tokens import MAX_LOG_RATIO, Ratios


def kl_penalty(x: Ratios, estimator: str) -> tuple[Tensor, Tensor]:
    """(value [t], slope [t]) float64 of an estimate of KL(pi || pi_ref) per token; slope is d value / d log pi(y_t).

    With d = log(pi(y_t) / pi_ref(y_t)):  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d  (GRPO, arXiv 2402.03300, eq. 4).
    A new probability of 0 adds nothing: no response holds such a token again.
    """
    assert x.tokens.ref_logp is not None
    counts = x.used & x.logp.isfinite()
    d = torch.where(counts, x.logp - x.tokens.ref_logp.double(), 0.0).clamp(min=-MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return d, counts.double()
        case "k2":
            return d.square() / 2, d
        case "k3":
            return torch.expm1(-d) + d, -torch.expm1(-d)
    raise ValueError(f"estimator is {estimator!r}; expected k1, k2 or k3")
