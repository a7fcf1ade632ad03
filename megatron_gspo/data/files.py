"""Prompts of a file in epochs: every row once per epoch, each epoch in an order of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data.prompt import Prompt

SHUFFLE, REPLACE = 0, 1  # separate random streams of one seed


class Rows(Protocol):
    """A file whose rows are read at random."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Prompt: ...


def draw_from_file(rows: Rows, seed: int, *, shuffle: bool) -> Callable[[int, int], Prompt]:
    """Draws position p from row `order[p % n]` of epoch p // n; a replacement is any row, chosen by seed, position and
    attempt. One order is kept in memory: 8 bytes a row."""
    n = len(rows)

    @lru_cache(maxsize=2)  # a batch may straddle two epochs
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, SHUFFLE, epoch]).permutation(n)

    def draw(position: int, attempt: int) -> Prompt:
        if attempt:
            return rows[int(np.random.default_rng([seed, REPLACE, position, attempt]).integers(n))]
        epoch, place = divmod(position, n)
        return rows[int(order(epoch)[place]) if shuffle else place]

    return draw


def to_prompt(row: Mapping[str, Any], config: DataConfig, place: str) -> Prompt:
    """The prompt in a row read from `place` (file:line). Raises ValueError where it has none."""
    if config.prompt_key not in row:
        raise ValueError(
            f"{place}: no field '{config.prompt_key}' (data.prompt_key); the fields are {', '.join(row) or 'none'}"
        )
    prompt = row[config.prompt_key]
    if not is_prompt(prompt):
        raise ValueError(
            f"{place}: the field '{config.prompt_key}' (data.prompt_key) is {prompt!r:.80}; expected a non-empty "
            f"string, or a list of messages such as {{role: user, content: ...}}"
        )
    response = row.get(config.response_key)
    return Prompt(
        id=place,
        prompt=prompt,
        response=response if isinstance(response, str) else None,
        meta={name: value for name, value in row.items() if name != config.prompt_key},
    )


def is_prompt(value: Any) -> bool:
    """Whether `value` is a non-empty string or a non-empty list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value)
    return isinstance(value, str) and value != ""
