"""From the terms of tokens to this rank's share of the loss: one path for every policy objective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gspo.objective.correction import Correction, apply_corrections
from megatron_gspo.objective.diagnostics import ratio_diagnostics
from megatron_gspo.objective.metrics import Metric, Sum, TokenMean
from megatron_gspo.objective.reference import kl_penalty
from megatron_gspo.objective.slope import with_slope
from megatron_gspo.objective.surrogate import Objective, Surrogate
from megatron_gspo.objective.tokens import Ratios, Tokens, importance_ratios


def policy_loss(
    tokens: Tokens,
    objective: Objective,
    weights: Tensor,
    *,
    corrections: Sequence[tuple[str, Correction]] = (),
    kl: tuple[str, float] | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """This rank's share of the loss (minimised) of one micro-batch, a float64 scalar, and its metrics.

        L = - sum_i weights_i sum_t ( c_it J_it - beta KL_it )

    weights [m] float64: from `token_weights`. J: of `objective`; c: of `corrections`; KL: of `kl` = (estimator, beta).
    Shares add up over micro-batches, DP and CP ranks, gradients likewise; nothing is to be multiplied by the CP size.
    Called by every rank of the context-parallel group. A sequence without trained tokens adds 0, and so does one with a
    bad value (see `Ratios`), which is reported as num_bad_sequences.
    """
    x = importance_ratios(tokens)
    term = objective(x)
    metrics: dict[str, Metric] = {}
    correction = None
    if corrections:
        correction, metrics = apply_corrections(x, corrections)
    total, slope = _weighted(term, weights, correction, x)
    loss = -total
    if kl:
        estimator, beta = kl
        penalty, penalty_slope = kl_penalty(x, estimator)
        weight = x.spread(weights)
        loss = loss + beta * torch.dot(weight, penalty)
        slope -= beta * weight * penalty_slope
        metrics["kl_reference"] = TokenMean(penalty.sum(), x.count)
    return loss + with_slope(x.tokens.logp, slope.neg_()), {"loss": Sum(loss), **metrics, **ratio_diagnostics(x, term)}


def _weighted(term: Surrogate, weights: Tensor, correction: Tensor | None, x: Ratios) -> tuple[Tensor, Tensor]:
    """sum_i w_i sum_t c_it J_it over this rank's tokens [], and its slope [t]."""
    if correction is None and x.is_of_sequences(term.value):
        slope = x.spread(weights * term.slope).masked_fill_(~x.used, 0.0)
        return torch.dot(weights * x.num_used, term.value), slope
    weight = x.spread(weights).masked_fill_(~x.used, 0.0)
    if correction is not None:
        weight *= correction
    return torch.dot(weight, x.at_tokens(term.value)), weight.mul_(x.at_tokens(term.slope))
