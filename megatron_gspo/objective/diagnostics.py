"""What is worth watching beside the loss, for any objective."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objective.metrics import Max, Metric, Sum, TokenMean
from megatron_gspo.objective.ratio import check_tokens


def mean_difference(logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How far the trainer's log-probabilities are from the rollout engine's, over trained tokens.

    logp, rollout_logp [t] float; mask [t] bool. rollout_gap: mean |difference|; rollout_gap_max: its largest;
    rollout_gap_not_finite: tokens left out because one of the two is nan or infinite.
    """
    check_tokens(logp=logp, rollout_logp=rollout_logp, mask=mask)
    gap = (logp.detach().double() - rollout_logp.double()).abs()
    used = mask & gap.isfinite()
    gap = torch.where(used, gap, 0.0)
    return {
        "rollout_gap": TokenMean(gap.sum(), used.double().sum()),
        "rollout_gap_max": Max.of(torch.where(used, gap, torch.nan)),
        "rollout_gap_not_finite": Sum((mask & ~used).double().sum()),
    }


def mean_entropy(entropy: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Mean entropy (nats) of the next-token distributions at trained tokens. entropy [t] float; mask [t] bool."""
    check_tokens(entropy=entropy, mask=mask)
    return {"entropy": TokenMean(torch.where(mask, entropy.detach().double(), 0.0).sum(), mask.double().sum())}
