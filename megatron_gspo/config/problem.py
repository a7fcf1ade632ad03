"""What is wrong with a recipe, told so that it can be put right: place, key, value, reason, nearest valid choice."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml
from omegaconf import MISSING

from megatron_gspo.config.source import Sources, is_set, nearest

# difflib's ratio from which on a word is another one misspelt: bf16 and fp16 have 0.75 in common.
MISSPELT = 0.8


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One refusal. `value` is what the key has, or MISSING where it has none; `hint` says what would be valid.

    `also` are other keys that the reason is about: those that the command line set are named as such, for it may be
    them that were meant otherwise.
    """

    key: str
    reason: str
    value: Any = MISSING
    hint: str = ""
    also: tuple[str, ...] = ()

    def describe(self, sources: Sources) -> str:
        """One line, e.g. `demo.yaml:12: batch.promts = 32: no such key; did you mean batch.prompts?`"""
        source = nearest(sources, self.key)
        place = "" if source is None else f"{source}: "
        origin = "" if is_set(sources, self.key) else " (default)"
        value = "" if self.value == MISSING else f" = {show(self.value)}{origin}"
        named = self.reason.startswith(tuple(f"{self.key}{after}" for after in (" =", "=", ":", ".")))
        reason = self.reason if named else f"{self.key}{value}: {self.reason}"
        overrides = (
            [] if source and source.line is None else [key for key in self.also if _on_command_line(sources, key)]
        )
        last = f" ({', '.join(overrides)}: from the command line)" if overrides else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{place}{reason}{last}{hint}"


class RecipeError(ValueError):
    """A recipe that is refused, with every problem that was found."""

    def __init__(self, problems: Sequence[Problem], sources: Sources):
        super().__init__(problems, sources)  # both in `args`, so that the error survives pickling
        self.problems = tuple(problems)
        self.sources = sources

    def __str__(self) -> str:
        return "\n".join(problem.describe(self.sources) for problem in self.problems)


def _on_command_line(sources: Sources, key: str) -> bool:
    source = nearest(sources, key)
    return is_set(sources, key) and source is not None and source.line is None


def show(value: Any) -> str:
    """`value` as it would be written in YAML, except that strings are always quoted."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def suggest(word: Any, choices: Iterable[str]) -> str:
    """A hint: the choice that `word` misspells; where it is no misspelling, all of them, unless too many to read."""
    choices = list(choices)
    near = difflib.get_close_matches(str(word), choices, n=1, cutoff=MISSPELT)
    if near:
        return f"did you mean {near[0]}?"
    return f"valid: {', '.join(choices)}" if 0 < len(choices) <= 20 else ""


def divisors(number: int) -> str:
    """A hint that lists the divisors of `number`; none for a number beyond what any key may mean."""
    if number > 2**31:
        return ""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return "valid: " + ", ".join(str(n) for n in sorted({*small, *(number // n for n in small)}))


def complaint(error: Exception) -> str:
    """What an error of YAML or OmegaConf complains about, without the context that they append."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        return error.problem
    return str(error).splitlines()[0]
