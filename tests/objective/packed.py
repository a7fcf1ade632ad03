"""Ragged rows packed as objectives take them, with a tail of garbage behind them, and what comes out per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.objective import Metric, Tokens, Totals, policy_loss, reduce_metrics, token_weights
from tests.objective.family import Member, oracle_member
from tests.objective.oracle import Case

TAIL = 3  # tokens of padding behind the last row
Rows = Sequence[Tensor] | Sequence[Sequence[float]]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pack(rows: Rows, garbage: float = torch.nan) -> Tensor:
    """[t] float64: the rows one after the other, then garbage."""
    return torch.cat([torch.as_tensor(row, dtype=torch.float64) for row in [*rows, [garbage] * TAIL]])


def offsets_of(rows: Rows) -> Tensor:
    return torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)


def tokens_of(
    new: Rows,
    old: Rows | None = None,
    *,
    advantages: Sequence[float] | Tensor | Rows,
    mask: Rows | None = None,
    rollout: Rows | None = None,
    ref: Rows | None = None,
    rows: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tokens:
    """One rank's micro-batch of m ragged rows. old: zeros by default; mask: all tokens; rows: 0 to m - 1.

    advantages: m numbers, or m rows with one for every token.
    """
    per_token = len(new) > 0 and not isinstance(advantages, Tensor) and not isinstance(advantages[0], int | float)
    mask = mask if mask is not None else [[1.0] * len(row) for row in new]
    return Tokens(
        logp=pack(new).to(dtype).requires_grad_(),
        old_logp=pack(old if old is not None else [[0.0] * len(row) for row in new]).to(dtype),
        rollout_logp=None if rollout is None else pack(rollout).to(dtype),
        ref_logp=None if ref is None else pack(ref).to(dtype),
        mask=pack(mask, 0).bool(),
        offsets=offsets_of(new),
        trained_lens=torch.tensor([int(sum(map(bool, row))) for row in mask], dtype=torch.int64),
        rows=torch.tensor(range(len(new)) if rows is None else rows, dtype=torch.int64),
        advantages=pack(advantages) if per_token else torch.as_tensor(advantages, dtype=torch.float64),  # type: ignore[arg-type]
        group=None,
    )


def totals_of(tokens: Tokens, max_tokens: int = 8) -> Totals:
    """As if the micro-batch were the whole mini-batch."""
    n = tokens.trained_lens.numel()
    return Totals(num_sequences=max(n, 1), num_tokens=int(tokens.trained_lens.sum()), max_tokens=max_tokens)


@dataclass(frozen=True, eq=False)
class Result:
    """loss; gradient of every row [T_i] float64; metrics as they came, and as they would be reported."""

    loss: float
    gradient: list[Tensor]
    metrics: dict[str, Metric]

    @property
    def flat(self) -> Tensor:
        return torch.cat([f64(), *self.gradient])

    @property
    def reported(self) -> dict[str, float]:
        return reduce_metrics(self.metrics, dp_cp_group=None, dp_group=None, device="cpu")

    @property
    def bad_rows(self) -> list[int]:
        return self.metrics["num_bad_sequences"].flagged  # type: ignore[attr-defined]


def evaluate(tokens: Tokens, member: Member, totals: Totals | None = None, **options: Any) -> Result:
    """Loss, gradient and metrics; `options` are those of `policy_loss`. The tail must get no gradient."""
    weights = token_weights(member.aggregation, tokens.trained_lens, totals or totals_of(tokens))
    loss, metrics = policy_loss(tokens, member.objective, weights, **options)
    loss.backward()
    gradient = tokens.logp.grad
    assert gradient is not None and not gradient[int(tokens.offsets[-1]) :].any()
    lens = tokens.offsets.diff().tolist()
    return Result(loss.item(), list(gradient[: sum(lens)].double().split(lens)), metrics)


def packed_loss(
    case: Case, name: str, numbers: Sequence[int] | None = None, *, dtype: torch.dtype = torch.float64
) -> Result:
    """Of rows `numbers` of the case (all by default) under the oracle's objective `name`; totals stay the case's."""
    rows = list(range(case.n) if numbers is None else numbers)
    member = oracle_member(name, case.hp)
    new, old, mask = ([side[i] for i in rows] for side in (case.new, case.old, case.mask))
    advantages: Any = (case.without_std if member.without_std else case.advantages)[rows]
    if name == "gspo_token":
        assert case.token_advantages is not None
        advantages = [case.token_advantages[i] for i in rows]
    tokens = tokens_of(new, old, advantages=advantages, mask=mask, rows=rows, dtype=dtype)
    totals = Totals(
        num_sequences=case.n, num_tokens=int(case.trained_lens.sum()), max_tokens=int(case.hp["dr_grpo_max_len"])
    )
    return evaluate(tokens, member, totals)
