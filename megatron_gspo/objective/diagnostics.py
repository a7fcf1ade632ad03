"""What is worth watching beside the loss, for any objective."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objective.metrics import Max, Metric, Sum, TokenMean
from megatron_gspo.objective.ratio import check_tokens


def policy_diagnostics(logp: Tensor, entropy: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Entropy of the policy, and how far its log-probabilities are from the rollout engine's, over trained tokens.

    logp, entropy, rollout_logp [t] float, detached; mask [t] bool.
    entropy: mean over next-token distributions, in nats. rollout_gap: mean |logp - rollout_logp|; rollout_gap_max: its
    largest; rollout_gap_not_finite: tokens left out of both because one of the two is nan or infinite.
    """
    check_tokens(logp=logp, entropy=entropy, rollout_logp=rollout_logp, mask=mask)
    gap = (logp.double() - rollout_logp.double()).abs()
    compared = mask & gap.isfinite()
    return {
        "entropy": TokenMean(torch.where(mask, entropy.double(), 0.0).sum(), mask.double().sum()),
        "rollout_gap": TokenMean(torch.where(compared, gap, 0.0).sum(), compared.double().sum()),
        "rollout_gap_max": Max.of(torch.where(compared, gap, torch.nan)),
        "rollout_gap_not_finite": Sum((mask & ~compared).double().sum()),
    }
