"""Ragged rows packed as `gspo_loss` takes them, with a tail of garbage behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gspo.objective import Metric, gspo_loss
from tests.objective.oracle import Case

TAIL = 3  # tokens of padding behind the last row


def pack(rows: Sequence[Tensor], garbage: float = torch.nan) -> Tensor:
    """[t]: the rows one after the other, then garbage."""
    return torch.cat([*rows, torch.full((TAIL,), garbage, dtype=torch.float64)])


def offsets_of(rows: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *(row.numel() for row in rows)]).cumsum(0)


def packed_loss(
    case: Case, numbers: Sequence[int] | None = None, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], dict[str, Metric]]:
    """Loss, its gradient per row, and metrics of rows `numbers` (all by default); N stays the case's."""
    numbers = range(case.n) if numbers is None else numbers
    new, old, mask = ([side[i] for i in numbers] for side in (case.new, case.old, case.mask))
    logp = pack(new).to(dtype).requires_grad_()
    loss, metrics = gspo_loss(
        logp,
        pack(old).to(dtype),
        pack(mask, 0).bool(),
        offsets_of(new),
        case.trained_lens[list(numbers)],
        case.advantages[list(numbers)],
        rows=torch.tensor(list(numbers), dtype=torch.int64),
        num_sequences=case.n,
        group=None,
        **case.clip,
    )
    loss.backward()
    assert logp.grad is not None and not logp.grad[-TAIL:].any()
    return loss.detach(), list(logp.grad[:-TAIL].double().split([row.numel() for row in new])), metrics
