"""Generalized advantage estimation (GAE), arXiv 1506.02438, over the trained tokens of packed responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gspo.objective.tokens import check_shapes


@dataclass(frozen=True, eq=False)
class Gae:
    """advantages [t] float64: 0 where a token does not train and all along a bad response.

    returns [t] float64: advantage plus value, what the critic learns; 0 where a token does not train, nan all along a
    bad response, so that whoever holds a part of one knows. bad [m] bool: a trained token's value is nan or infinite.
    """

    advantages: Tensor
    returns: Tensor
    bad: Tensor


def gae(
    values: Tensor, mask: Tensor, offsets: Tensor, rewards: Tensor, *, gamma: float, lam: float, whiten: bool = False
) -> Gae:
    """A_t = sum_k (gamma lam)^k delta_{t+k},   delta_t = r_t + gamma V_{t+1} - V_t   (eq. 16, to the response's end).

    values [t] float: V_t of what precedes token t. mask [t] bool: the tokens that train; t + 1 is the next one of them.
    offsets [m+1] int64: sequence i owns [offsets[i], offsets[i+1]). rewards [m] float64: r at a sequence's last trained
    token, 0 before; V after it is 0. `whiten` shifts and scales the advantages of all trained tokens to mean 0 and
    standard deviation 1 (returns are of the unscaled ones); equal advantages become 0.
    Raises ValueError for tensors that do not belong together and for a reward that is not finite.
    """
    t, m = mask.numel(), offsets.numel() - 1
    check_shapes("token", t, values=values, mask=mask)
    check_shapes("sequence", m, rewards=rewards)
    if not rewards.isfinite().all():
        rows = (~rewards.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards of rows {rows} are not finite: {rewards[rows].tolist()}; a reward must be a number")
    if offsets[0] != 0 or offsets[-1] != t:
        raise ValueError(f"offsets must go from 0 to {t}, got {int(offsets[0])} to {int(offsets[-1])}")

    sequence = torch.repeat_interleave(offsets.diff(), output_size=t)[mask]
    trained = values[mask].double()
    bad = torch.zeros(m, dtype=torch.bool, device=mask.device)
    bad[sequence[~trained.isfinite()]] = True
    trained = torch.where(bad[sequence], 0.0, trained)

    lens = torch.bincount(sequence, minlength=m)
    left = lens.cumsum(0)[sequence] - 1 - torch.arange(len(sequence), device=mask.device)
    following = torch.where(left > 0, torch.cat([trained[1:], trained[:1]]), 0.0)
    delta = torch.where(left > 0, 0.0, rewards.double()[sequence]) + gamma * following - trained
    advantages = _reverse_scan(delta, torch.where(left > 0, gamma * lam, torch.zeros_like(delta)))
    returns = torch.where(bad[sequence], torch.nan, advantages + trained)
    if whiten:
        advantages = _whitened(advantages, ~bad[sequence])
    advantages = torch.where(bad[sequence], 0.0, advantages)
    return Gae(_scattered(advantages, mask), _scattered(returns, mask), bad)


def _reverse_scan(values: Tensor, factors: Tensor) -> Tensor:
    """[k]: A_i = values_i + factors_i A_{i+1}, both [k] float64.

    Cut into about sqrt(k) pieces that are scanned side by side, then one after the other what each leaves to the piece
    before it: O(k) work in O(sqrt(k)) steps, however long the sequences are.
    """
    k = values.numel()
    width = math.isqrt(k) + 1
    pieces = -(-k // width)
    sums, products = (F.pad(x, (0, pieces * width - k)).view(pieces, width).t().contiguous() for x in (values, factors))
    for i in reversed(range(width - 1)):
        sums[i].addcmul_(products[i], sums[i + 1])
        products[i].mul_(products[i + 1])
    after = [0.0]
    for first, product in zip(reversed(sums[0].tolist()), reversed(products[0].tolist()), strict=True):
        after.append(first + product * after[-1])
    sums.addcmul_(products, sums.new_tensor(after[-2::-1]))
    return sums.t().flatten()[:k]


def _whitened(advantages: Tensor, counts: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the entries that count: deviations of 1e-4 and less stay small.

    Taken above the lowest: rounding in the mean is no deviation.
    """
    kept = advantages[counts]
    if not kept.numel():
        return advantages
    above = advantages - kept.min()
    deviation = above - above[counts].mean()
    return deviation / (deviation[counts].square().mean() + 1e-8).sqrt()


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_scatter(mask, values)
