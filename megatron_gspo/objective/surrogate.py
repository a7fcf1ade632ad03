"""What an objective says of a token, and how tokens add up to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.objective.tokens import Ratios


@dataclass(frozen=True, eq=False)
class Surrogate:
    """A token's term J_t of an objective that is maximised; detached, finite where a token is not used.

    All are [t], or [m] where the tokens of a sequence have them in common.

    value: J_t. slope: dJ_t / d log pi(y_t), given in closed form beside it, so that no autograd rule meets an infinite
    ratio; float64. clipped: the trust region cut the slope off. log_ratio: log of the ratio that the objective uses.
    """

    value: Tensor
    slope: Tensor
    clipped: Tensor
    log_ratio: Tensor


# An objective of the family with its numbers bound.
Objective = Callable[[Ratios], Surrogate]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, log_ratio: Tensor
) -> Surrogate:
    """min( r A, clip(r, 1 - clip_low, 1 + clip_high) A ) of PPO (arXiv 1707.06347, eq. 7); its slope is r A or 0.

    At r on a bound the unclipped slope is kept; A = 0 is never clipped. All [t] or [m] float64.
    """
    unclipped = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high).mul_(advantages)
    is_clipped = bounded < unclipped
    value = torch.minimum(unclipped, bounded)
    slope = unclipped.masked_fill_(is_clipped, 0.0)
    return Surrogate(value=value, slope=slope, clipped=is_clipped, log_ratio=log_ratio)


def weighted_policy_gradient(weight: Tensor, x: Ratios, *, clipped: Tensor, log_ratio: Tensor) -> Surrogate:
    """sg[w] A log pi(y_t): REINFORCE with a weight. weight, log_ratio [t] float64, clipped [t] bool."""
    slope = weight * x.advantages
    # A new probability of 0 has a ratio of 0 and so no slope: 0 x -inf is left out.
    return Surrogate(value=slope * x.logp.clamp(min=-1e300), slope=slope, clipped=clipped, log_ratio=log_ratio)


def choose(condition: Tensor, yes: float, no: float) -> Tensor:
    """[t] float64; torch.where makes float32 of two Python numbers."""
    return torch.where(condition, torch.tensor(yes, dtype=torch.float64, device=condition.device), no)
