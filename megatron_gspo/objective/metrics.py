"""Metrics that know by their type how they add up over micro-batches and ranks.

Token-level metrics hold local shares: every CP rank has its own tokens, so they are reduced over DP x CP.
Sequence-level metrics are whole on every CP rank (their sums were reduced over CP before), so they are reduced over DP.
Tensors are detached float64 unless said, and stay on their device until `reduce_metrics`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Self
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

_BFLOAT16 = 2**16  # how many of its numbers there are


class Scope(Enum):
    """Which all-reduce a metric takes part in."""

    token_sum = "sum over DP x CP"
    sequence_sum = "sum over DP"
    maximum = "maximum over DP x CP"


@dataclass(frozen=True, eq=False)
class Metric(ABC):
    """One named quantity of a mini-batch, or a micro-batch's part of it."""

    scope: ClassVar[Scope]

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """With another micro-batch's part."""

    @abstractmethod
    def pack(self, num_rows: int) -> Tensor:
        """[k] float64, to be all-reduced as `scope` says; k depends on the type and on `num_rows` only."""

    @abstractmethod
    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        """What to report, from the all-reduced `packed` [k] on the CPU."""

    def num_rows(self) -> int:
        """One more than the largest row number held here."""
        return 0


@dataclass(frozen=True, eq=False)
class Sum(Metric):
    """Sum over tokens of local shares; total []."""

    scope = Scope.token_sum
    total: Tensor

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total)

    def pack(self, num_rows: int) -> Tensor:
        return self.total[None]

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        return {name: packed.item()}


@dataclass(frozen=True, eq=False)
class TokenMean(Metric):
    """total / count over tokens, [] each; 0 over none."""

    scope = Scope.token_sum
    total: Tensor
    count: Tensor

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)

    def pack(self, num_rows: int) -> Tensor:
        return torch.stack([self.total, self.count])

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        total, count = packed.tolist()
        return {name: total / count if count else 0.0}


@dataclass(frozen=True, eq=False)
class EffectiveSampleSize(Metric):
    """(sum w)^2 / (n sum w^2) over tokens (Kish), from 1 (equal weights) to 1 / n; each []. 0 over none."""

    scope = Scope.token_sum
    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, weights: Tensor, counts: Tensor) -> Self:
        """Of weights [k], each that of counts [k] tokens; float64. Beyond 1e150 they count as that, to be squared."""
        w = weights.masked_fill(counts == 0, 0.0).clamp_(max=1e150)
        return cls(torch.dot(w, counts), torch.dot(w.square(), counts), counts.sum())

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def pack(self, num_rows: int) -> Tensor:
        return torch.stack([self.total, self.squares, self.count])

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        total, squares, count = packed.tolist()
        return {name: total / squares * total / count if squares else 0.0}


@dataclass(frozen=True, eq=False)
class Max(Metric):
    """Largest value [] over tokens or sequences; -inf is none and reported as nan."""

    scope = Scope.maximum
    value: Tensor

    def merge(self, other: Self) -> Self:
        return type(self)(torch.maximum(self.value, other.value))

    def pack(self, num_rows: int) -> Tensor:
        return self.value[None]

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        return {name: math.nan if packed == -math.inf else packed.item()}


@dataclass(frozen=True, eq=False)
class Min(Metric):
    """Smallest value [] over tokens or sequences; inf is none and reported as nan."""

    scope = Scope.maximum
    value: Tensor

    def merge(self, other: Self) -> Self:
        return type(self)(torch.minimum(self.value, other.value))

    def pack(self, num_rows: int) -> Tensor:
        return -self.value[None]

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        return {name: math.nan if packed == -math.inf else -packed.item()}


@dataclass(frozen=True, eq=False)
class TokenQuantiles(Metric):
    """1 % and 99 % quantiles over tokens: the least value that so many are not above; nan where there are none.

    values [t] bfloat16, two bytes a token: rounded to 8 bits, a quantile is off by at most 1 / 256 of itself. Its
    65,536 numbers are the bins of a histogram, whose counts add up exactly in any order. not_used []: how many of the
    values are a 0 that does not count.
    """

    scope = Scope.token_sum
    values: Tensor
    not_used: Tensor

    def merge(self, other: Self) -> Self:
        return type(self)(torch.cat([self.values, other.values]), self.not_used + other.not_used)

    def pack(self, num_rows: int) -> Tensor:
        counts = torch.bincount(self.values.view(torch.int16).long() % _BFLOAT16, minlength=_BFLOAT16).double()
        counts[0] -= self.not_used
        return counts

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        bits = torch.arange(_BFLOAT16).to(torch.int16)  # wraps around: the sign comes last
        bins, order = bits.view(torch.bfloat16).double().sort()
        below = packed[order].cumsum(0)
        total = below[-1]
        places = torch.searchsorted(below, total * below.new_tensor([0.01, 0.99]))
        low, high = bins[places].tolist() if total else (math.nan, math.nan)
        return {f"{name}_p01": low, f"{name}_p99": high}


@dataclass(frozen=True, eq=False)
class SequenceValues(Metric):
    """One value per sequence, reported as mean, min, max and exact 1 % and 99 % quantiles; nan where there are none.

    rows [m] int64: row numbers in the batch, which no two values may share. values [m]: nan is no value.
    """

    scope = Scope.sequence_sum
    rows: Tensor
    values: Tensor

    def merge(self, other: Self) -> Self:
        return type(self)(torch.cat([self.rows, other.rows]), torch.cat([self.values, other.values]))

    def num_rows(self) -> int:
        return _num_rows(self.rows)

    def pack(self, num_rows: int) -> Tensor:
        present = ~self.values.isnan()
        dense = self.values.new_zeros(2, num_rows)
        dense[0].index_add_(0, self.rows, torch.where(present, self.values, 0.0))
        dense[1].index_add_(0, self.rows, present.double())
        return dense.flatten()

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        dense, present = packed.view(2, -1)
        assert (present <= 1).all(), f"{name}: rows {(present > 1).nonzero().flatten().tolist()} were given twice"
        values = dense[present > 0]
        if not values.numel():
            values = values.new_tensor([math.nan])
        low, high = values.quantile(values.new_tensor([0.01, 0.99])).tolist()
        return {
            f"{name}/mean": values.mean().item(),
            f"{name}/min": values.min().item(),
            f"{name}/p01": low,
            f"{name}/p99": high,
            f"{name}/max": values.max().item(),
        }


@dataclass(frozen=True, eq=False)
class SequenceFlags(Metric):
    """A defect per sequence, reported as the number of sequences that have it and, if any, the first one's row.

    rows [m] int64: row numbers in the batch. flags [m] bool.
    """

    scope = Scope.sequence_sum
    rows: Tensor
    flags: Tensor

    @property
    def flagged(self) -> list[int]:
        """Rows with the defect among those held here."""
        return self.rows[self.flags].tolist()

    def merge(self, other: Self) -> Self:
        return type(self)(torch.cat([self.rows, other.rows]), torch.cat([self.flags, other.flags]))

    def num_rows(self) -> int:
        return _num_rows(self.rows)

    def pack(self, num_rows: int) -> Tensor:
        return self.rows.new_zeros(num_rows, dtype=torch.float64).index_add(0, self.rows, self.flags.double())

    def unpack(self, name: str, packed: Tensor) -> dict[str, float]:
        flagged = packed.nonzero().flatten().tolist()
        first = {f"{name}/first_row": float(flagged[0])} if flagged else {}
        return {name: float(len(flagged)), **first}


def merge(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of a mini-batch from those of its micro-batches on this rank, which must have the same names."""
    for part in parts:
        assert part.keys() == parts[0].keys(), f"micro-batches differ in metrics: {sorted(part)}, {sorted(parts[0])}"
    names = parts[0] if parts else ()
    return {name: functools.reduce(lambda a, b: a.merge(b), (part[name] for part in parts)) for name in names}


def reduce_metrics(
    metrics: Mapping[str, Metric],
    *,
    dp_cp_group: dist.ProcessGroup | None,
    dp_group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> dict[str, float]:
    """The numbers to report, the same on every rank of `dp_cp_group`.

    Called by every rank of both groups (None: this rank alone) with metrics of the same names and types; a micro-batch
    without rows yields all of them, so no rank is without. At most four all-reduces on `device`: one of three numbers
    that compares the names and finds the number of rows, then one per `Scope`.
    """
    order = sorted(metrics)
    num_rows = _agree(metrics, dp_cp_group, device)
    reported: dict[str, float] = {}
    for scope, op, group in (
        (Scope.token_sum, dist.ReduceOp.SUM, dp_cp_group),
        (Scope.sequence_sum, dist.ReduceOp.SUM, dp_group),
        (Scope.maximum, dist.ReduceOp.MAX, dp_cp_group),
    ):
        names = [name for name in order if metrics[name].scope is scope]
        if not names:
            continue
        packed = [metrics[name].pack(num_rows).to(device) for name in names]
        total = torch.cat(packed)
        if group is not None:
            dist.all_reduce(total, op, group=group)
        for name, part in zip(names, total.cpu().split([p.numel() for p in packed]), strict=True):
            reported |= metrics[name].unpack(name, part)
    return reported


def _agree(metrics: Mapping[str, Metric], group: dist.ProcessGroup | None, device: torch.device | str) -> int:
    """The number of rows over all ranks, once all ranks are known to hold metrics of the same names and types."""
    schema = [f"{name}: {type(metrics[name]).__name__}" for name in sorted(metrics)]
    digest = crc32("\n".join(schema).encode())
    num_rows = max((metric.num_rows() for metric in metrics.values()), default=0)
    header = torch.tensor([digest, -digest, num_rows], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(header, dist.ReduceOp.MAX, group=group)
    largest, smallest, num_rows = header.long().tolist()
    assert largest == -smallest, f"ranks hold different metrics and cannot reduce them; this one has {schema}"
    return num_rows


def _num_rows(rows: Tensor) -> int:
    return int(rows.max()) + 1 if rows.numel() else 0
