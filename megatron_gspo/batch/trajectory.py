"""What is known of a batch of responses: an index that every rank holds, and token-level data that only some do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum

import torch
from torch import Tensor


class Finish(IntEnum):
    """Why a response ended: stop token, `max_new_tokens`, or aborted by the engine."""

    stop = 0
    length = 1
    abort = 2


@dataclass(frozen=True, eq=False)
class TrajectoryIndex:
    """The small part of a rollout batch, known to every rank. n trajectories, CPU tensors; position = row number.

    prompt_lens, response_lens [n] int64: tokens. trained_lens [n] int64: response tokens that train, |y_i|.
    group [n] int64: number of the prompt in the batch. rewards [n] float64. finish [n] uint8 (`Finish`).
    metrics: name -> [n] float64, what the reward reports besides its value.
    """

    prompt_lens: Tensor
    response_lens: Tensor
    trained_lens: Tensor
    group: Tensor
    rewards: Tensor
    finish: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtypes = {"rewards": torch.float64, "finish": torch.uint8}
        for f in fields(self):
            if f.name != "metrics":
                _check(f"TrajectoryIndex.{f.name}", getattr(self, f.name), (self.n,), dtypes.get(f.name, torch.int64))
        for name, values in self.metrics.items():
            _check(f"TrajectoryIndex.metrics[{name!r}]", values, (self.n,), torch.float64)

    @property
    def n(self) -> int:
        """Number of trajectories."""
        return self.prompt_lens.numel()

    @property
    def lens(self) -> Tensor:
        """[n] int64, prompt and response."""
        return self.prompt_lens + self.response_lens


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Token-level data of m trajectories, packed one after the other; T = sum of their lengths. CPU tensors.

    rows [m] int64: row numbers in the batch. offsets [m+1] int64: trajectory i is [offsets[i], offsets[i+1]).
    tokens [T] int64. loss_mask [T] bool: the token itself trains (never a trajectory's first: nothing predicts it).
    logprobs [T] float32: the rollout engine's log-probability of the token given what precedes it; 0 on prompt tokens.
    versions [T] int64: weight version that sampled the token; -1 on prompt tokens.
    """

    rows: Tensor
    offsets: Tensor
    tokens: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    versions: Tensor

    def __post_init__(self) -> None:
        m, total = self.rows.numel(), self.tokens.numel()
        _check("Trajectories.rows", self.rows, (m,), torch.int64)
        _check("Trajectories.offsets", self.offsets, (m + 1,), torch.int64)
        _check("Trajectories.tokens", self.tokens, (total,), torch.int64)
        _check("Trajectories.loss_mask", self.loss_mask, (total,), torch.bool)
        _check("Trajectories.logprobs", self.logprobs, (total,), torch.float32)
        _check("Trajectories.versions", self.versions, (total,), torch.int64)
        if self.offsets[0] != 0 or self.offsets[-1] != total or not (self.offsets.diff() > 0).all():
            raise ValueError(
                f"Trajectories.offsets must rise strictly from 0 to {total} (an empty trajectory cannot be packed), "
                f"got {self.offsets.tolist()}"
            )
        untrainable = self.loss_mask[self.offsets[:-1]]
        if untrainable.any():
            raise ValueError(
                f"rows {self.rows[untrainable].tolist()} train on their first token, which nothing predicts; "
                "give them a prompt of at least one token"
            )

    def select(self, rows: Sequence[int]) -> Trajectories:
        """The given rows (batch row numbers, each held here), in the given order."""
        place = {row: i for i, row in enumerate(self.rows.tolist())}
        missing = [row for row in rows if row not in place]
        if missing:
            raise ValueError(f"rows {missing} are not among the trajectories held here ({len(place)} rows)")
        bounds = self.offsets.tolist()
        spans = [(bounds[place[row]], bounds[place[row] + 1]) for row in rows]

        def packed(values: Tensor) -> Tensor:
            return torch.cat([values[:0], *(values[start:end] for start, end in spans)])

        return Trajectories(
            rows=torch.tensor(rows, dtype=torch.int64),
            offsets=torch.tensor([0, *(end - start for start, end in spans)], dtype=torch.int64).cumsum(0),
            tokens=packed(self.tokens),
            loss_mask=packed(self.loss_mask),
            logprobs=packed(self.logprobs),
            versions=packed(self.versions),
        )


def _check(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(f"{name} must be {list(shape)} {dtype}, got {list(value.shape)} {value.dtype}")
