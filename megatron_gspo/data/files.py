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
    attempt. Two orders are kept in memory, 8 bytes a row each: a batch may straddle two epochs."""
    n = len(rows)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, SHUFFLE, epoch]).permutation(n)

    def draw(position: int, attempt: int) -> Prompt:
        if attempt:
            return rows[int(np.random.default_rng([seed, REPLACE, position, attempt]).integers(n))]
        epoch, place = divmod(position, n)
        return rows[int(order(epoch)[place]) if shuffle else place]

    return draw


def to_prompt(row: Mapping[str, Any], config: DataConfig, place: str, *, responses: bool = False) -> Prompt:
    """The prompt in a row read from `place` (file:line). Raises ValueError where it has none or, with `responses`,
    where it has no response to imitate."""
    prompt = _value(row, config.prompt_key, "prompt_key", place)
    if not is_prompt(prompt):
        raise ValueError(
            f"{place}: the field '{config.prompt_key}' (data.prompt_key) is {prompt!r:.80}; expected a non-empty "
            f"string, or a list of messages such as {{role: user, content: ...}}"
        )
    response = _value(row, config.response_key, "response_key", place) if responses else row.get(config.response_key)
    if responses and not isinstance(response, str):
        raise ValueError(
            f"{place}: the field '{config.response_key}' (data.response_key) is {response!r:.80}; expected a string"
        )
    return Prompt(
        id=place,
        prompt=prompt,
        response=response if isinstance(response, str) else None,
        meta={name: value for name, value in row.items() if name != config.prompt_key},
    )


def _value(row: Mapping[str, Any], name: str, key: str, place: str) -> Any:
    if name not in row:
        raise ValueError(f"{place}: no field '{name}' (data.{key}); the fields are {', '.join(row) or 'none'}")
    return row[name]


def is_prompt(value: Any) -> bool:
    """Whether `value` is a non-empty string or a non-empty list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value)
    return isinstance(value, str) and value != ""
