"""Group Sequence Policy Optimization (GSPO), arXiv 2507.18071."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.objective.metrics import Max, Metric, SequenceFlags, SequenceMean, SequenceValues, Sum
from megatron_gspo.objective.ratio import SequenceRatio, check_sequences, sequence_ratio


def gspo_loss(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    offsets: Tensor,
    trained_lens: Tensor,
    advantages: Tensor,
    *,
    rows: Tensor,
    clip_low: float,
    clip_high: float,
    num_sequences: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, dict[str, Metric]]:
    """This rank's share of the GSPO loss (minimised) of one micro-batch, and its metrics.

        s_i = exp( (1/|y_i|) sum_t log(pi(y_t) / pi_old(y_t)) )                              (eq. 7)
        J   = (1/N) sum_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )           (eq. 5)

    computed in the GSPO-token form (eq. 13 and 14, with A_it = A_i), which has the same value and gradient:

        J = (1/N) sum_i (1/|y_i|) sum_t min( s_it A_i, clip(s_it) A_i ),    s_it = sg[s_i] pi(y_t) / sg[pi(y_t)]

    A rank sums over its own tokens t, so the shares of the CP ranks add up to the loss, gradients likewise, and no
    collective stands in the backward pass. Nothing is to be multiplied by the CP size.

    logp [t] float, with gradient; old_logp [t] float, mask [t] bool: log-probability of the next token at the position
    that predicts it, and whether it trains. offsets [m+1] int64: local token ranges of the m sequences. trained_lens
    [m] int64: |y_i| over all CP ranks. advantages [m] float64. rows [m] int64: row numbers in the batch.
    num_sequences: N of the whole mini-batch, over all micro-batches and DP ranks, sequences without trained tokens
    included. Called by every rank of `group`: one all-reduce of [m] float64. Returns a float64 scalar.

    At s_i on a bound the unclipped gradient is kept; A_i = 0 is never clipped. A sequence without trained tokens adds
    0, and so does one with a bad value (see `SequenceRatio`), which is reported as num_bad_sequences.
    """
    check_sequences(offsets, advantages=advantages, rows=rows)
    ratio = sequence_ratio(logp, old_logp, mask, offsets, trained_lens, group=group)
    s = ratio.log_s.exp()
    a = torch.where(ratio.valid, advantages.double(), 0.0)
    length = trained_lens.clamp(min=1)

    unclipped, clipped = s * a, s.clamp(1 - clip_low, 1 + clip_high) * a
    is_clipped = clipped < unclipped
    value = torch.minimum(unclipped, clipped) * ratio.local_len / length
    slope = torch.where(is_clipped, 0.0, unclipped) / length
    objective = value + slope * (ratio.local_logp - ratio.local_logp.detach())  # the second term is 0: gradient only
    loss = -objective.sum() / num_sequences
    return loss, {"loss": Sum(loss.detach()), **_metrics(ratio, s, is_clipped, trained_lens, rows)}


def _metrics(ratio: SequenceRatio, s: Tensor, is_clipped: Tensor, lens: Tensor, rows: Tensor) -> dict[str, Metric]:
    """clip_fraction: tokens of clipped sequences over all tokens, as the paper plots it; _sequence: of sequences.

    kl_k1_sequence, kl_k3_sequence: means over sequences of -log s and s - 1 - log s, estimates of KL(old || new)
    per token that use the sequence's mean log-ratio as the log-ratio.
    """
    valid, log_s = ratio.valid, ratio.log_s
    num_tokens, num_valid = torch.where(valid, lens, 0).double(), valid.double()
    return {
        "clip_fraction": SequenceMean((is_clipped * num_tokens).sum(), num_tokens.sum()),
        "clip_fraction_sequence": SequenceMean(is_clipped.double().sum(), num_valid.sum()),
        "kl_k1_sequence": SequenceMean(-log_s.sum(), num_valid.sum()),
        "kl_k3_sequence": SequenceMean((s - 1 - log_s).sum(), num_valid.sum()),
        "ratio": SequenceValues(rows, torch.where(valid, s, torch.nan)),
        "abs_log_ratio_max": Max.of(log_s.abs()),
        "num_bad_sequences": SequenceFlags(rows, ratio.bad),
    }
