"""Binds the recipe's advantage estimator to a batch."""

from __future__ import annotations

from torch import Tensor

from megatron_gspo.batch.trajectory import TrajectoryIndex
from megatron_gspo.config import GroupConfig, LeaveOneOutConfig, Recipe
from megatron_gspo.objective import group_relative, leave_one_out


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
