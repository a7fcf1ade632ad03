"""Corrections for the gap between the rollout engine and the trainer, for any objective that takes ratios.

Responses were sampled by the engine's mu, while ratios compare with pi_old, the same weights in the trainer. The gap of
a token is g_t = log(pi_old(y_t) / mu(y_t)). A correction multiplies a token's term by a weight that is no function of
the trained policy; denominators stay as they are, so that what is masked counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_gspo.objective.metrics import EffectiveSampleSize, Metric, TokenMean
from megatron_gspo.objective.tokens import MAX_LOG_RATIO, Ratios


@dataclass(frozen=True, eq=False)
class Weights:
    """Of one correction: weight [t] float64; touched [t] bool, used tokens that it truncated or masked."""

    weight: Tensor
    touched: Tensor


# A correction with its numbers bound.
Correction = Callable[[Ratios], Weights]


def truncated_importance_sampling(x: Ratios, *, level: str, high: float) -> Weights:
    """min( w, high ): truncated importance sampling (TIS). `level` says what w is, see `log_weight`."""
    log_w = log_weight(x, level)
    w = log_w.exp()
    return Weights(weight=w.clamp(max=high), touched=(w > high) & x.used)


def icepop(x: Ratios, *, level: str, low: float, high: float) -> Weights:
    """w where low <= w <= high, else 0: IcePop (arXiv 2510.18855). `level` says what w is, see `log_weight`."""
    w = log_weight(x, level).exp()
    outside = (w < low) | (w > high)
    return Weights(weight=w.masked_fill(outside, 0.0), touched=outside & x.used)


def sequence_mask(x: Ratios, *, low: float, high: float) -> Weights:
    """1 where the geometric mean of a sequence's w_t, exp( mean of g_t ), is within [low, high], else 0."""
    w = log_weight(x, "sequence").exp()
    return _masked((w < low) | (w > high), x)


def off_policy_sequence_mask(x: Ratios, *, delta: float) -> Weights:
    """0 for tokens with A < 0 of a sequence with (1/|y_i|) sum_t log(mu(y_t) / pi(y_t)) > delta, else 1.

    OPSM (arXiv 2512.02556, section 3.1): what the policy has left behind is not to be pushed down further. The one
    correction that looks at the trained policy; its mask is a constant all the same.
    """
    left = x.spread(-(x.log_s + x.gap_mean)) > delta
    return _masked(left & (x.advantages < 0), x)


def log_weight(x: Ratios, level: str) -> Tensor:
    """[t] float64, log w. token: g_t. sequence: the mean of g_t over y_i. sequence_product: the sum of g_t over y_i."""
    match level:
        case "token":
            log_w = x.log_gap
        case "sequence":
            log_w = x.spread(x.gap_mean)
        case "sequence_product":
            log_w = x.spread(x.gap_mean * x.lens)
        case _:
            raise ValueError(f"level is {level!r}; expected token, sequence or sequence_product")
    return log_w.clamp(max=MAX_LOG_RATIO)


def apply_corrections(x: Ratios, corrections: Sequence[tuple[str, Correction]]) -> tuple[Tensor, dict[str, Metric]]:
    """The product of all weights [t], and what each of the named corrections did.

    NAME_fraction: tokens that it truncated or masked, over all trained tokens. correction_dropped: tokens that end up
    with weight 0, over all trained tokens. correction_weight: the mean weight; correction_ess: effective sample size of
    the weights over their number.
    """
    weight = x.used.double()
    metrics: dict[str, Metric] = {}
    for name, correction in corrections:
        part = correction(x)
        weight = weight * part.weight
        metrics[f"{name}_fraction"] = TokenMean(part.touched.sum().double(), x.count)
    metrics |= {
        "correction_weight": TokenMean(weight.sum(), x.count),
        "correction_dropped": TokenMean(x.count - weight.count_nonzero(), x.count),
        "correction_ess": EffectiveSampleSize.of(weight, x.used.double()),
    }
    return weight, metrics


def _masked(outside: Tensor, x: Ratios) -> Weights:
    return Weights(weight=(~outside).double(), touched=outside & x.used)
