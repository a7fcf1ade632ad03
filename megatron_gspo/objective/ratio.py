"""Importance ratios of packed sequences, exact on any context-parallel layout.

Legend: t local tokens, m sequences. Sequence i owns the local tokens [offsets[i], offsets[i+1]); what follows
offsets[m] is padding. `mask` marks the tokens that train; masked tokens never enter arithmetic, whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 256


@dataclass(frozen=True, eq=False)
class SequenceRatio:
    """Length-normalised importance ratios; everything float64 [m] or bool [m], detached unless said.

    log_s: (1/|y_i|) sum_t log(pi_new / pi_old) over the whole sequence on all CP ranks; 0 where not `valid`. It may be
    -inf (a new probability of 0). valid: the sequence has trained tokens and no bad value. bad: a trained token has a
    log-probability that no probability gives (nan, +inf) or could not have been sampled (old -inf); such a sequence
    is never used.
    local_len: trained tokens on this rank. local_logp: sum of the new log-probabilities over them, with gradient.
    """

    log_s: Tensor
    valid: Tensor
    bad: Tensor
    local_len: Tensor
    local_logp: Tensor


def sequence_ratio(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    offsets: Tensor,
    trained_lens: Tensor,
    *,
    group: dist.ProcessGroup | None,
) -> SequenceRatio:
    """Ratios of m packed sequences from local log-probabilities.

    logp, old_logp [t] float; mask [t] bool; offsets [m+1] int64; trained_lens [m] int64, |y_i| over all CP ranks.
    Called by every rank of `group` (the CP group; None where one rank holds whole sequences): it costs one all-reduce
    of [m] float64, outside of the graph. fp32 sums of 50,000 tokens would be off by more than GSPO's clip range.
    """
    check_tokens(logp=logp, old_logp=old_logp, mask=mask)
    check_sequences(offsets, trained_lens=trained_lens)
    new, old = logp.detach().double(), old_logp.double()
    impossible = new.isnan() | new.isposinf() | ~old.isfinite()
    # A bad token turns its partial sum into nan, so that one sum tells every CP rank both the ratio and the defect.
    log_ratio = torch.where(mask, torch.where(impossible, torch.nan, new - old), 0.0)
    log_ratio_sum = segment_sum(log_ratio, offsets)
    if group is not None:
        dist.all_reduce(log_ratio_sum, group=group)

    trained, bad = trained_lens > 0, log_ratio_sum.isnan()
    valid = trained & ~bad
    return SequenceRatio(
        log_s=torch.where(valid, log_ratio_sum, 0.0) / trained_lens.clamp(min=1),
        valid=valid,
        bad=bad,
        local_len=segment_sum(mask.double(), offsets),
        # At new = -inf the ratio and with it the gradient is 0: the token is left out rather than meeting inf - inf.
        local_logp=segment_sum(torch.where(mask & logp.isfinite(), logp.double(), 0.0), offsets),
    )


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """[m]: sum of values[offsets[i] : offsets[i+1]] for each i, 0 for an empty one. Differentiable in `values` [t].

    Sums pieces of at most `_PIECE` tokens, then pieces: one running sum over 50,000 tokens would lose four digits.
    """
    pieces = torch.arange(0, values.numel() + _PIECE, _PIECE, device=offsets.device).clamp(max=values.numel())
    cuts = torch.cat([offsets, pieces]).sort().values
    piece_sums = torch.segment_reduce(values, "sum", offsets=cuts, unsafe=True)
    ends = torch.searchsorted(cuts, torch.cat([offsets, cuts[-1:]]))
    return torch.segment_reduce(piece_sums, "sum", offsets=ends, unsafe=True)[:-1]


def check_tokens(**tensors: Tensor) -> None:
    """Raise ValueError unless all are [t] for the same t."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(shapes.values()))
    if len(first) != 1 or any(shape != first for shape in shapes.values()):
        raise ValueError(f"token tensors must all be [t] for one t, got {shapes}")


def check_sequences(offsets: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless all are [m] for offsets [m+1]."""
    for name, tensor in tensors.items():
        if tensor.shape != (offsets.numel() - 1,):
            raise ValueError(f"{name} must be [m] = [{offsets.numel() - 1}] as offsets say, got {list(tensor.shape)}")
