"""Supervised fine-tuning: cross-entropy on given responses."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objective.metrics import Metric, Sum
from megatron_gspo.objective.tokens import check_shapes


def sft_loss(logp: Tensor, mask: Tensor, *, num_tokens: int) -> tuple[Tensor, dict[str, Metric]]:
    """This rank's share of -(1/num_tokens) sum_t logp_t over the trained tokens of a micro-batch, a float64 scalar.

    logp [t] float, with gradient; mask [t] bool: the tokens that train. num_tokens: trained tokens of the whole
    mini-batch, over all micro-batches, DP and CP ranks. Shares add up over them; no collective.
    """
    check_shapes("token", mask.numel(), logp=logp)
    loss = -torch.where(mask, logp.double(), 0.0).sum() / max(num_tokens, 1)
    return loss, {"loss": Sum(loss.detach())}
