"""Ragged rows packed as objectives take them, with a tail of garbage behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gspo.objective import Metric, Tokens, Totals, policy_loss, token_weights
from tests.objective.family import oracle_member
from tests.objective.oracle import Case

TAIL = 3  # tokens of padding behind the last row


def pack(rows: Sequence[Tensor], garbage: float = torch.nan) -> Tensor:
    """[t]: the rows one after the other, then garbage."""
    return torch.cat([*rows, torch.full((TAIL,), garbage, dtype=torch.float64)])


def offsets_of(rows: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *(row.numel() for row in rows)]).cumsum(0)


def totals_of(case: Case) -> Totals:
    """Of the whole case, bad rows included."""
    return Totals(
        num_sequences=case.n, num_tokens=int(case.trained_lens.sum()), max_tokens=int(case.hp["dr_grpo_max_len"])
    )


def packed_loss(
    case: Case, name: str = "gspo", numbers: Sequence[int] | None = None, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], dict[str, Metric]]:
    """Loss, its gradient per row, and metrics of rows `numbers` (all by default); totals stay the case's."""
    rows = list(range(case.n) if numbers is None else numbers)
    new, old, mask = ([side[i] for i in rows] for side in (case.new, case.old, case.mask))
    member = oracle_member(name, case.hp)
    logp = pack(new).to(dtype).requires_grad_()
    lens = case.trained_lens[rows]
    advantages = (case.without_std if member.without_std else case.advantages)[rows]
    if name == "gspo_token":
        assert case.token_advantages is not None
        advantages = pack([case.token_advantages[i] for i in rows])
    tokens = Tokens(
        logp=logp,
        old_logp=pack(old).to(dtype),
        mask=pack(mask, 0).bool(),
        offsets=offsets_of(new),
        trained_lens=lens,
        rows=torch.tensor(rows, dtype=torch.int64),
        advantages=advantages,
        group=None,
    )
    weights = token_weights(member.aggregation, lens, totals_of(case))
    loss, metrics = policy_loss(tokens, member.objective, weights)
    loss.backward()
    assert logp.grad is not None and not logp.grad[-TAIL:].any()
    return loss.detach(), list(logp.grad[:-TAIL].double().split([row.numel() for row in new])), metrics
