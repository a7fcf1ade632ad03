"""What a replay of recorded batches leaves without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING

from megatron_gspo.config.reflect import keys
from megatron_gspo.config.schema import Recipe
from megatron_gspo.config.source import join

# Keys of `rollout` and `data` that training from records needs too: the rest is about sampling.
USED = ("rollout.replay", "rollout.temperature", "rollout.max_new_tokens", "data.max_prompt_tokens")
SAMPLING = ("data.", "reward.", "rollout.")


def idle_in_replay(recipe: Recipe) -> list[str]:
    """Keys away from their default that `rollout.replay` leaves without effect; none where it is not set.

    They are told rather than refused: a replay is an ordinary recipe with one override, and its records say how they
    were sampled.
    """
    if recipe.rollout is None or recipe.rollout.replay is None:
        return []
    changed = _changed(recipe)
    return [path for path in changed if path.startswith(SAMPLING) and path not in USED]


def _changed(section: Any, prefix: str = "") -> Iterator[str]:
    """Keys that differ from their default, and optional sections that are there."""
    for key in keys(type(section)).values():
        path, value = join(prefix, key.name), getattr(section, key.name)
        if not dataclasses.is_dataclass(value):
            if key.default not in (value, MISSING):
                yield path
        elif prefix and key.optional:
            yield path
        else:
            yield from _changed(value, path)
