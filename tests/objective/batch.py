"""Random responses with everything that an objective may be given of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.objective import Tokens
from tests.objective.family import Member
from tests.objective.formulas import Response
from tests.objective.packed import tokens_of


@dataclass(frozen=True, eq=False)
class Batch:
    """n ragged rows, [T_i] float64 each (mask: bool), and advantages [n] float64."""

    new: list[Tensor]
    old: list[Tensor]
    rollout: list[Tensor]
    ref: list[Tensor]
    mask: list[Tensor]
    token_advantages: list[Tensor]
    advantages: Tensor

    def tokens(
        self,
        member: Member,
        numbers: Sequence[int] | None = None,
        *,
        rollout: bool = True,
        ref: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> Tokens:
        """Rows `numbers` (all by default), with token advantages where the objective takes them."""
        rows = list(range(len(self.new)) if numbers is None else numbers)
        advantages = [self.token_advantages[i] for i in rows] if member.token_advantages else self.advantages[rows]
        return tokens_of(
            [self.new[i] for i in rows],
            [self.old[i] for i in rows],
            advantages=advantages,
            mask=[self.mask[i] for i in rows],
            rollout=[self.rollout[i] for i in rows] if rollout else None,
            ref=[self.ref[i] for i in rows] if ref else None,
            rows=rows,
            dtype=dtype,
        )

    def responses(self, member: Member) -> list[Response]:
        """The same for the formulas in plain Python."""
        per_row = zip(self.new, self.old, self.rollout, self.token_advantages, self.mask, strict=True)
        plain = [[x[mask].tolist() for x in row] for *row, mask in per_row]
        for row, a in zip(plain, self.advantages.tolist(), strict=True):
            row[3] = row[3] if member.token_advantages else [a] * len(row[0])
        return [Response(*row) for row in plain]


def random_batch(lens: Sequence[int], *, seed: int = 0, drift: float = 0.15, gap: float = 0.1) -> Batch:
    """Rows of `lens` tokens, one of seven masked but the first. drift, gap: std of log(pi/pi_old), log(pi_old/mu)."""
    random = torch.Generator().manual_seed(seed)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=random, dtype=torch.float64)

    old = [-0.2 - 2 * torch.rand(n, generator=random, dtype=torch.float64) for n in lens]
    mask = [torch.rand(n, generator=random) < 6 / 7 for n in lens]
    for row in mask:
        row[:1] = True
    return Batch(
        new=[(row + drift * noise(row.numel())).clamp(max=-0.01) for row in old],
        old=old,
        rollout=[(row + gap * noise(row.numel())).clamp(max=-0.01) for row in old],
        ref=[(row + 2 * gap * noise(row.numel())).clamp(max=-0.01) for row in old],
        mask=mask,
        token_advantages=[noise(n) for n in lens],
        advantages=noise(len(lens)),
    )
