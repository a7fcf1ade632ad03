"""The oracle: cases.json (seeded float64 cases, analytic results; its `conventions` say what numbers mean)."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """One case with ragged rows of T_i tokens: new, old [T_i] float64, mask [T_i] bool each."""

    id: str
    new: list[Tensor]
    old: list[Tensor]
    mask: list[Tensor]
    rewards: Tensor
    group: Tensor
    advantages: Tensor  # [n] float64: given in the case, else the expected ones
    without_std: Tensor  # [n] float64: given in the case, else those of Dr.GRPO
    token_advantages: list[Tensor] | None  # [T_i] float64 each, of the GSPO-token case
    hp: dict[str, float]
    expected: dict[str, Any]
    cp_checks: dict[int, list[dict[str, Any]]]  # cp -> per row: what each CP rank owns under the zigzag split

    @property
    def n(self) -> int:
        return len(self.new)

    @property
    def trained_lens(self) -> Tensor:
        return torch.tensor([int(m.sum()) for m in self.mask])


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by id."""
    file = json.loads((Path(__file__).parent / "cases.json").read_text())
    return {raw["id"]: _case(raw) for raw in file["cases"]}


def numbers(values: Any) -> Tensor:
    """A JSON list of numbers, or of 'nan', 'inf' and '-inf', as float64."""
    parsed = [[float(x) for x in row] if isinstance(row, list) else float(row) for row in values]
    return torch.tensor(parsed, dtype=torch.float64)


def _case(raw: dict[str, Any]) -> Case:
    inputs, expected = raw["inputs"], raw["expected"]
    given, per_token = inputs.get("advantages_in"), inputs.get("token_advantages_in")
    if "rows" in inputs:
        pairs = [_long_row(row) for row in inputs["rows"]]
        new, old = [list(side) for side in zip(*pairs, strict=True)]
        mask = [torch.ones_like(row, dtype=torch.bool) for row in new]
    else:
        new, old = list(numbers(inputs["new_logp"])), list(numbers(inputs["old_logp"]))
        mask = list(torch.tensor(inputs["mask"]).bool())
    return Case(
        id=raw["id"],
        new=new,
        old=old,
        mask=mask,
        rewards=numbers(inputs["rewards"]),
        group=torch.tensor(inputs["group_ids"]),
        advantages=numbers(given or expected["advantages"]),
        without_std=numbers(given or expected["advantages_alt"]["dr_grpo"]),
        token_advantages=list(numbers(per_token)) if per_token else None,
        hp=raw["hp"],
        expected=expected,
        cp_checks={int(cp): checks for cp, checks in raw.get("cp_checks", {}).items()},
    )


def _long_row(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(new, old) of a compactly given long row."""
    n, delta = row["T"], row["delta"]
    t, constant = torch.arange(n), functools.partial(torch.full, (n,), dtype=torch.float64)
    old = constant(row["old_const"]) if "old_const" in row else -0.75 - 2 * _uniform(row["old_seed"], n)
    value, amplitude = constant(delta["value"]), constant(delta.get("amp", 0.0))
    match delta["kind"]:
        case "const":
            change = value
        case "block":
            change = torch.where(t < n // 2, amplitude, -amplitude) + value
        case "outlier":
            change = torch.where(t == delta["pos"], amplitude, value)
        case "uniform":
            change = value + amplitude * (2 * _uniform(delta["seed"], n) - 1)
        case kind:
            raise ValueError(f"unknown delta kind {kind!r}")
    return old + change, old


def _uniform(seed: int, n: int) -> Tensor:
    """[n] float64 in [0, 1) from the file's linear congruential generator."""
    values, state = [], seed
    for _ in range(n):
        state = (1664525 * state + 1013904223) % 2**32
        values.append(state / 2**32)
    return torch.tensor(values, dtype=torch.float64)
