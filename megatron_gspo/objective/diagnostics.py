"""What is worth watching beside the loss, for any objective."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.objective.metrics import (
    EffectiveSampleSize,
    Max,
    Metric,
    Min,
    SequenceFlags,
    SequenceValues,
    Sum,
    TokenMean,
    TokenQuantiles,
)
from megatron_gspo.objective.segment import segment_sum
from megatron_gspo.objective.surrogate import Surrogate
from megatron_gspo.objective.tokens import Ratios, check_shapes


def ratio_diagnostics(x: Ratios, term: Surrogate) -> dict[str, Metric]:
    """How far the policy has moved from the old one, and what the trust region did.

    clip_fraction: clipped tokens over all trained tokens (arXiv 2507.18071, figure 2). clip_fraction_sequence: mean
    over sequences of the clipped share of their tokens: for a ratio of sequences, the share of clipped sequences.
    ratio: exp of the mean log-ratio, per sequence. token_log_ratio: smallest and largest (0 among them) and quantiles.
    abs_log_ratio_max: of the ratio that the objective uses; ess: its effective sample size over the number of tokens.
    kl_k1, kl_k3: means over tokens of -log r and r - 1 - log r, estimates of KL(old || new).
    """
    log_r, lens = x.log_ratio, x.lens.clamp(min=1)
    clipped, counts = _counts(term, x)
    log_r_sum = log_r.sum()
    lowest, highest = _extremes(log_r)
    return {
        "clip_fraction": TokenMean(clipped.sum(), x.count),
        "clip_fraction_sequence": TokenMean((clipped / lens).sum(), (x.num_used / lens).sum()),
        "kl_k1": TokenMean(-log_r_sum, x.count),
        "kl_k3": TokenMean(torch.expm1(log_r).sum() - log_r_sum, x.count),
        "ess": EffectiveSampleSize.of(term.log_ratio.exp(), counts),
        "token_log_ratio": TokenQuantiles(log_r.bfloat16(), log_r.numel() - x.count),
        "ratio": SequenceValues(x.tokens.rows, torch.where(x.valid, x.log_s.exp(), torch.nan)),
        "token_log_ratio_min": Min(lowest),
        "token_log_ratio_max": Max(highest),
        "abs_log_ratio_max": Max(torch.stack(_extremes(term.log_ratio)).abs().amax()),
        "num_bad_sequences": SequenceFlags(x.tokens.rows, x.bad),
    }


def policy_diagnostics(logp: Tensor, entropy: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Entropy of the policy, and how far its log-probabilities are from the rollout engine's, over trained tokens.

    logp, entropy, rollout_logp [t] float, detached; mask [t] bool.
    entropy: mean over next-token distributions, in nats. rollout_gap: mean |logp - rollout_logp|; rollout_gap_max: its
    largest; rollout_gap_not_finite: tokens left out of both because one of the two is nan or infinite.
    """
    check_shapes("token", mask.numel(), logp=logp, entropy=entropy, rollout_logp=rollout_logp)
    gap = (logp - rollout_logp).abs()  # of two near numbers: exact in their own dtype
    compared = (gap < torch.inf).logical_and_(mask)
    gap = gap.masked_fill_(~compared, 0.0)
    count, num_compared = mask.count_nonzero().double(), compared.count_nonzero().double()
    return {
        "entropy": TokenMean(torch.where(mask, entropy, 0.0).sum(dtype=torch.float64), count),
        "rollout_gap": TokenMean(gap.sum(dtype=torch.float64), num_compared),
        "rollout_gap_max": Max(_extremes(gap)[1].double()),
        "rollout_gap_not_finite": Sum(count - num_compared),
    }


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of values [t], which are 0 where a token is not used; 0 and 0 without tokens."""
    return values.aminmax() if values.numel() else (values.sum(), values.sum())


def _counts(term: Surrogate, x: Ratios) -> tuple[Tensor, Tensor]:
    """[m]: clipped tokens of each sequence here; and how many tokens each of the term's elements stands for."""
    if x.is_of_sequences(term.clipped):
        return term.clipped * x.num_used, x.num_used
    return segment_sum((term.clipped & x.used).float(), x.tokens.offsets).double(), x.used.double()
