"""The critic's loss: squared errors of values, clipped around the old values as in PPO2 (OpenAI Baselines)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.objective.metrics import Metric, Scope, SequenceFlags, Sum, TokenMean
from megatron_gspo.objective.segment import segment_sum
from megatron_gspo.objective.slope import with_slope
from megatron_gspo.objective.tokens import check_shapes, sequence_of_token, spread


@dataclass(frozen=True, eq=False)
class ValueTokens:
    """The tokens of one micro-batch on one rank, as `Tokens` has them for the policy.

    values [t] float: V of what precedes each token, with gradient. old_values [t] float: V before the step's first
    update. returns [t] float64: what V is to become. mask [t] bool: the tokens that train. offsets [m+1] int64: local
    token ranges. rows [m] int64: row numbers in the batch. group: the context-parallel group; None where one rank holds
    whole sequences.
    """

    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor
    offsets: Tensor
    rows: Tensor
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that do not belong together."""
        per_token = {"values": self.values, "old_values": self.old_values, "returns": self.returns}
        check_shapes("token", self.mask.numel(), mask=self.mask, **per_token)
        check_shapes("sequence", self.offsets.numel() - 1, rows=self.rows)


@dataclass(frozen=True, eq=False)
class ExplainedVariance(Metric):
    """1 - Var(R - V) / Var(R) over tokens: 1 where values are right, 0 where a constant would do; 0 if R is constant.

    moments [5] float64: number of tokens, sums of R, R^2, R - V and (R - V)^2.
    """

    scope = Scope.token_sum
    moments: Tensor

    @classmethod
    def of(cls, returns: Tensor, errors: Tensor, used: Tensor) -> Self:
        """Of returns R and errors V - R, [t] float64 each, where used [t] bool."""
        r, e = (torch.where(used, x, 0.0) for x in (returns, errors))
        return cls(torch.stack([used.double().sum(), r.sum(), r.square().sum(), -e.sum(), e.square().sum()]))

    def merge(self, other: Self) -> Self:
        return type(self)(self.moments + other.moments)

    def pack(self, num_rows: int) -> Tensor:
        return self.moments

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        count, r, r_squared, e, e_squared = packed.tolist()
        # n^2 times the variances; rounding leaves some ulps of the squares where all returns are equal.
        total = count * r_squared - r * r
        if total <= 1e-12 * count * r_squared:
            return {name: 0.0}
        return {name: 1 - (count * e_squared - e * e) / total}


def value_loss(tokens: ValueTokens, *, num_tokens: int, clip: float | None) -> tuple[Tensor, dict[str, Metric]]:
    """This rank's share of the critic's loss (minimised) of one micro-batch, a float64 scalar, and its metrics.

        L = 1/T sum_i sum_t 1/2 max( (V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2 )

    num_tokens: T, trained tokens of the whole mini-batch over all micro-batches, DP and CP ranks. A `clip` of None
    leaves (V - R)^2. Shares and gradients add up over micro-batches and ranks. A sequence with a value or return that
    is nan or infinite at a trained token adds 0 and is reported as num_bad_sequences.
    Costs one all-reduce of [m] float64, by every rank of the context-parallel group.
    """
    bad = _bad_sequences(tokens)
    used = tokens.mask & ~spread(bad, sequence_of_token(tokens.offsets, tokens.mask.numel()))
    values, old_values, returns = (
        torch.where(used, x.detach().double(), 0.0) for x in (tokens.values, tokens.old_values, tokens.returns)
    )
    error = values - returns
    slope, worst = error, error.square()
    is_clipped = torch.zeros_like(used)
    if clip is not None:
        move = values - old_values
        clipped_square = (old_values + move.clamp(-clip, clip) - returns).square()
        # Within the range both are the same number but for rounding, which must not cut the slope off.
        is_clipped = (move.abs() > clip) & (clipped_square > worst)
        worst = torch.where(is_clipped, clipped_square, worst)
        slope = slope.masked_fill(is_clipped, 0.0)
    loss = worst.sum() / (2 * max(num_tokens, 1))
    count = used.double().sum()
    metrics: dict[str, Metric] = {
        "loss": Sum(loss),
        "clip_fraction": TokenMean(is_clipped.double().sum(), count),
        "value": TokenMean(values.sum(), count),
        "return": TokenMean(returns.sum(), count),
        "explained_variance": ExplainedVariance.of(returns, error, used),
        "num_bad_sequences": SequenceFlags(tokens.rows, bad),
    }
    return loss + with_slope(tokens.values, slope / max(num_tokens, 1)), metrics


def _bad_sequences(tokens: ValueTokens) -> Tensor:
    """[m] bool, the same on all CP ranks."""
    finite = tokens.values.isfinite() & tokens.old_values.isfinite() & tokens.returns.isfinite()
    counts = segment_sum((tokens.mask & ~finite).double(), tokens.offsets)
    if tokens.group is not None:
        dist.all_reduce(counts, group=tokens.group)
    return counts > 0
