"""Advantages from rewards. They need whole groups and are computed from the index, before anything is cut."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative(rewards: Tensor, group: Tensor, *, normalize_std: bool, eps: float) -> Tensor:
    """[n] float64: (r - mean of its group), over (std + eps) if `normalize_std` (ddof 1; arXiv 2507.18071, eq. 6).

    rewards [n] float64, finite; group [n] int64: any labels, in any order. Equal rewards and groups of one give exactly
    0: rewards are taken above their group's lowest, so that rounding in the mean is not divided by a std of rounding.
    """
    index, size = _groups(rewards, group)
    above = rewards - _lowest(rewards, index, size)[index]
    deviation = above - (_sum(above, index, size) / size)[index]
    if not normalize_std:
        return deviation
    std = (_sum(deviation.square(), index, size) / (size - 1).clamp(min=1)).sqrt()[index]
    return torch.where(std > 0, deviation / (std + eps), 0.0)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """[n] float64: r - mean of the others of its group (RLOO, arXiv 2402.14740, section 3.3).

    rewards [n] float64, finite; group [n] int64. Equal rewards and groups of one give exactly 0.
    """
    index, size = _groups(rewards, group)
    above = rewards - _lowest(rewards, index, size)[index]
    others = (size - 1)[index]
    return torch.where(others > 0, above - (_sum(above, index, size)[index] - above) / others.clamp(min=1), 0.0)


def zero_variance_share(rewards: Tensor, group: Tensor) -> float:
    """Share of groups whose rewards are all equal (groups of one included): they give no gradient. 0 without groups."""
    index, size = _groups(rewards, group)
    above = rewards - _lowest(rewards, index, size)[index]
    return (_sum(above, index, size) == 0).sum().item() / max(size.numel(), 1)


def _groups(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each reward's group [n] and the sizes of the groups [g], both int64."""
    if rewards.shape != group.shape or rewards.dtype != torch.float64:
        raise ValueError(
            f"rewards must be float64 and shaped as group {list(group.shape)}, "
            f"got {rewards.dtype} {list(rewards.shape)}"
        )
    if not rewards.isfinite().all():
        rows = (~rewards.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards of rows {rows} are not finite: {rewards[rows].tolist()}; a reward must be a number")
    _, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    return index, size


def _lowest(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    return torch.full_like(size, torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amin")


def _sum(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    return torch.zeros_like(size, dtype=values.dtype).index_add(0, index, values)
