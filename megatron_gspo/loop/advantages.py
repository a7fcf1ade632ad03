"""Binds the recipe's advantage estimator to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.batch.trajectory import TrajectoryIndex
from megatron_gspo.config import GaeConfig, GroupConfig, LeaveOneOutConfig, Recipe
from megatron_gspo.loop.cut import Cut, gather_tokens, spread_tokens
from megatron_gspo.objective import gae, group_relative, leave_one_out
from megatron_gspo.policy.layout import Layout


@dataclass(frozen=True)
class Targets:
    """What the updates of a step aim at, per mini-batch.

    advantages[k]: [n] float64, of every response of the batch, or [t] float64 for each micro-batch. returns[k]: [t]
    float64 for each micro-batch, for the critic; none without one.
    """

    advantages: Sequence[Tensor | Sequence[Tensor]]
    returns: Sequence[Sequence[Tensor]]


def make_targets(
    recipe: Recipe, index: TrajectoryIndex, cuts: Sequence[Cut], values: Sequence[Sequence[Tensor]], layout: Layout
) -> Targets:
    """The targets of a step. `values[k][j]`: the critic's, [t] on the last pipeline stage; collective with a critic."""
    if isinstance(recipe.advantage, GaeConfig):
        return _token_targets(recipe.advantage, index, cuts, values, layout)
    return Targets(advantages=[sequence_advantages(recipe, index)] * len(cuts), returns=[])


def sequence_advantages(recipe: Recipe, index: TrajectoryIndex) -> Tensor:
    """[n] float64: the advantage of every response of the batch; zeros for an objective that takes none."""
    match recipe.advantage:
        case None:
            return index.rewards.new_zeros(index.n)
        case GroupConfig(normalize_std=normalize_std, eps=eps):
            return group_relative(index.rewards, index.group, normalize_std=normalize_std, eps=eps)
        case LeaveOneOutConfig():
            return leave_one_out(index.rewards, index.group)
    raise TypeError(f"{type(recipe.advantage).__name__} gives no advantages of responses")


def _token_targets(
    config: GaeConfig, index: TrajectoryIndex, cuts: Sequence[Cut], values: Sequence[Sequence[Tensor]], layout: Layout
) -> Targets:
    """GAE over whole responses, the same on every rank: no sum depends on how the batch was cut."""
    trains = [[micro_batch.loss_mask for micro_batch in cut.micro_batches] for cut in cuts]
    estimate = gae(
        gather_tokens(cuts, values, index, layout),
        gather_tokens(cuts, trains, index, layout).bool(),
        torch.cat([torch.zeros(1, dtype=torch.int64), index.lens.cumsum(0)]),
        index.rewards,
        gamma=config.gamma,
        lam=config.lam,
        whiten=config.whiten,
    )
    return Targets(
        advantages=spread_tokens(estimate.advantages, cuts, index),
        returns=spread_tokens(estimate.returns, cuts, index),
    )
