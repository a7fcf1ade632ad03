"""What every policy objective is computed from: the tokens of one micro-batch on one rank, and their ratios.

Legend: t local tokens, m sequences. Sequence i owns the local tokens [offsets[i], offsets[i+1]); what follows
offsets[m] is padding. `mask` marks the tokens that train; masked tokens never enter arithmetic, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.objective.segment import segment_sum

# exp of it, 1e217, is the largest ratio that takes part in arithmetic: finite times any advantage and summed over any
# tokens. An infinity would make nan of tokens without advantage or weight.
MAX_LOG_RATIO = 500.0


@dataclass(frozen=True, eq=False)
class Tokens:
    """The input of a policy objective.

    logp [t] float: log pi(y_t) of the trained policy, with gradient, at the position that predicts the token.
    old_logp [t] float: of the policy that the ratios compare with. rollout_logp, ref_logp [t] float: of the rollout
    engine and of the reference policy; None where the objective does not use them.
    mask [t] bool. offsets [m+1] int64: local token ranges. trained_lens [m] int64: |y_i|, over all CP ranks.
    rows [m] int64: row numbers in the batch. advantages: [m] float64 (A_i), or [t] float64 (A_it).
    group: the context-parallel group; None where one rank holds whole sequences.
    """

    logp: Tensor
    old_logp: Tensor
    mask: Tensor
    offsets: Tensor
    trained_lens: Tensor
    rows: Tensor
    advantages: Tensor
    group: dist.ProcessGroup | None
    rollout_logp: Tensor | None = None
    ref_logp: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that do not belong together, or that could be of tokens or of sequences."""
        t, m = self.mask.numel(), self.offsets.numel() - 1
        if t == m > 0:
            raise ValueError(f"[t] and [m] are told apart by size, and both are {m}; add an untrained position")
        check_shapes("token", t, mask=self.mask, logp=self.logp, old_logp=self.old_logp)
        check_shapes("token", t, **{k: v for k, v in self._optional().items() if v is not None})
        check_shapes("sequence", m, trained_lens=self.trained_lens, rows=self.rows)
        if self.advantages.shape != self.mask.shape:
            check_shapes("sequence", m, advantages=self.advantages)

    def _optional(self) -> dict[str, Tensor | None]:
        return {"rollout_logp": self.rollout_logp, "ref_logp": self.ref_logp}


@dataclass(frozen=True, eq=False)
class Ratios:
    """Importance ratios of `Tokens`, all detached; float64 unless said.

    used [t] bool: trained tokens of valid sequences. sequence [t] int32: the token's sequence; m is padding.
    log_ratio [t]: log(pi / pi_old), 0 where a token is not used; -inf (a new probability of 0) is a value.
    given_advantages: A_i [m] or A_it [t], as `Tokens` has them, finite everywhere.
    log_s [m]: mean of log_ratio over a sequence's trained tokens on all CP ranks.
    lens [m]: |y_i|. valid, bad [m] bool: a valid sequence has trained tokens and no bad value. A bad one has a
    log-probability that no probability gives (nan, +inf), or of -inf in a policy other than the trained one, at a
    trained token; it is never used, and reported.
    """

    used: Tensor
    sequence: Tensor
    log_ratio: Tensor
    given_advantages: Tensor
    log_s: Tensor
    lens: Tensor
    valid: Tensor
    bad: Tensor
    tokens: Tokens
    gap: tuple[Tensor, Tensor] | None

    @property
    def log_gap(self) -> Tensor:
        """[t]: log(pi_old / pi_rollout) of used tokens, else 0. ValueError without the rollout's log-probabilities."""
        return self._gap()[0]

    @property
    def gap_mean(self) -> Tensor:
        """[m]: mean of log_gap over a sequence's trained tokens on all CP ranks. ValueError as for log_gap."""
        return self._gap()[1]

    def _gap(self) -> tuple[Tensor, Tensor]:
        if self.gap is None:
            raise ValueError("Tokens.rollout_logp is None, and the gap to the rollout engine is asked for: give them")
        return self.gap

    @cached_property
    def advantages(self) -> Tensor:
        """[t]: A_it."""
        return self.at_tokens(self.given_advantages)

    @cached_property
    def num_used(self) -> Tensor:
        """[m]: used tokens of each sequence on this rank."""
        return segment_sum(self.used.float(), self.tokens.offsets).double()

    @cached_property
    def count(self) -> Tensor:
        """[]: used tokens on this rank."""
        return self.num_used.sum()

    @cached_property
    def logp(self) -> Tensor:
        """[t]: log pi(y_t) of used tokens, else 0; -inf is a value."""
        return torch.where(self.used, self.tokens.logp.detach().double(), 0.0)

    @cached_property
    def old_logp(self) -> Tensor:
        """[t]: log pi_old(y_t) of used tokens, else 0."""
        return torch.where(self.used, self.tokens.old_logp.double(), 0.0)

    def spread(self, values: Tensor) -> Tensor:
        """[t]: every token's own of `values` [m]; 0 for padding."""
        return spread(values, self.sequence)

    def is_of_sequences(self, values: Tensor) -> bool:
        """Whether `values` are [m], one for all tokens of a sequence, rather than [t]."""
        return values.numel() == self.lens.numel()

    def at_tokens(self, values: Tensor) -> Tensor:
        """[t], from `values` [t] or [m]."""
        return self.spread(values) if self.is_of_sequences(values) else values

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[m]: (1/|y_i|) sum of `values` [t] over a sequence on all CP ranks. One all-reduce of [m] float64."""
        return _sequence_sums([values], self.tokens)[0] / self.lens.clamp(min=1)


def importance_ratios(tokens: Tokens) -> Ratios:
    """The ratios of a micro-batch; every rank of the group calls it.

    Costs one all-reduce of [m] float64 ([2, m] with rollout log-probabilities) outside of the graph, however many
    tokens there are. fp32 sums of 50,000 tokens would be off by more than GSPO's clip range.
    """
    log_ratio = tokens.logp.detach().double() - tokens.old_logp
    summands = [log_ratio]
    # A bad token makes the sum of its sequence nan or +inf, so that one sum tells every CP rank ratio and defect. Only
    # -inf is ambiguous: the new policy's -inf is a value, any other policy's +inf is not.
    ambiguous = [tokens.old_logp]
    if tokens.rollout_logp is not None:
        summands.append(tokens.old_logp.double() - tokens.rollout_logp)
        ambiguous.append(tokens.rollout_logp)
    if tokens.ref_logp is not None:
        ambiguous.append(tokens.ref_logp.abs())
    for logp in ambiguous:
        log_ratio.masked_fill_(~(logp < torch.inf), torch.nan)
    untrained = ~tokens.mask
    for summand in summands:
        summand.masked_fill_(untrained, 0.0)
    sums = _sequence_sums(summands, tokens)

    bad = ~(sums < torch.inf).all(0)
    valid = (tokens.trained_lens > 0) & ~bad
    means = torch.where(valid, sums, 0.0) / tokens.trained_lens.clamp(min=1)
    sequence = sequence_of_token(tokens.offsets, tokens.mask.numel())
    used = tokens.mask & spread(valid, sequence)
    unused = ~used
    for summand in summands:  # the tokens of bad sequences go too
        summand.masked_fill_(unused, 0.0)
    return Ratios(
        used=used,
        sequence=sequence,
        log_ratio=log_ratio.clamp_(max=MAX_LOG_RATIO),
        given_advantages=torch.where(
            valid if tokens.advantages.shape == valid.shape else used, tokens.advantages.double(), 0.0
        ),
        log_s=means[0].clamp(max=MAX_LOG_RATIO),
        lens=tokens.trained_lens,
        valid=valid,
        bad=bad,
        tokens=tokens,
        gap=(summands[1], means[1]) if tokens.rollout_logp is not None else None,
    )


def _sequence_sums(values: Sequence[Tensor], tokens: Tokens) -> Tensor:
    """[k, m] from k `values` [t], over all CP ranks."""
    sums = torch.stack([segment_sum(row, tokens.offsets) for row in values])
    if tokens.group is not None:
        dist.all_reduce(sums, group=tokens.group)
    return sums


def sequence_of_token(offsets: Tensor, t: int) -> Tensor:
    """[t] int32: which of the m sequences each of t tokens belongs to; m for padding. offsets [m+1] int64."""
    lens = torch.cat([offsets.diff(), t - offsets[-1:]])
    return torch.repeat_interleave(lens.int(), output_size=t)


def spread(values: Tensor, sequence: Tensor) -> Tensor:
    """[t]: every token's own of `values` [m], 0 for padding. sequence [t]: from `sequence_of_token`."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, sequence)


def check_shapes(what: str, size: int, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are [size], one element per `what`."""
    wrong = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor.shape != (size,)}
    if wrong:
        raise ValueError(f"expected one element per {what}, [{size}], got {wrong}")
