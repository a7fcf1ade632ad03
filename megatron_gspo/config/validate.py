"""Refuses recipes that contradict themselves, before anything starts. Nothing here edits a value."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_gspo.config.fit import model_problems, world_problems
from megatron_gspo.config.problem import Problem, RecipeError
from megatron_gspo.config.reflect import leaves
from megatron_gspo.config.rules import RULES
from megatron_gspo.config.schema import Recipe

# Beyond these a number means nothing, and fails wherever it first meets C: of threads, sockets or tensors.
LARGEST_INT = 2**63 - 1
TEN_YEARS_S = 10 * 365 * 86_400


def validate(recipe: Recipe, world_size: int | None = None) -> None:
    """Raise RecipeError with every problem of `recipe`; with `world_size` trainer ranks, also of its layout on them."""
    problems = [*_bounds(recipe), *(problem for rule in RULES for problem in rule(recipe))]
    if not problems:  # the sizes below are divided by one another
        problems += model_problems(recipe)
        problems += world_problems(recipe, world_size) if world_size is not None else ()
    if problems:
        raise RecipeError(problems, recipe.sources)


def _bounds(recipe: Recipe) -> Iterator[Problem]:
    for path, key, value in leaves(recipe):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(key=path, value=value, reason="must be finite")
        elif not key.bounds.admits(value):
            yield Problem(key=path, value=value, reason=f"must be {key.bounds}")
        elif isinstance(value, int) and value > LARGEST_INT:
            yield Problem(key=path, value=value, reason=f"must be at most {LARGEST_INT} (2^63 - 1)")
        elif key.name.endswith("_s") and value > TEN_YEARS_S:
            yield Problem(key=path, value=value, reason=f"must be at most {TEN_YEARS_S} seconds, which are ten years")
