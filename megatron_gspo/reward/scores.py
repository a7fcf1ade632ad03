"""What a reward function may return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Metrics `reward/NAME` that every run has.
RESERVED = {"mean", "std", "zero_variance_groups", "errors", "overlong"}


def check(scores: Any) -> dict[str, float]:
    """What a reward function returned, as floats: a number, or a mapping of names to numbers with "reward" among them.

    Raises ValueError for anything else, for numbers that are not finite, and for names that make no metric.
    """
    named = scores if isinstance(scores, Mapping) else {"reward": scores}
    for name in named:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ValueError(
                f"a reward function returned an entry named {name!r}: names are printable text, each a metric "
                "reward/NAME"
            )
    values = {name: _number(name, value) for name, value in named.items()}
    if "reward" not in values:
        raise ValueError(f"a reward function returned {values}, which has no 'reward'")
    if taken := RESERVED & values.keys():
        raise ValueError(
            f"a reward function returned {sorted(taken)}: names of metrics that every run has; rename them"
        )
    if bad := {name: value for name, value in values.items() if not math.isfinite(value)}:
        raise ValueError(f"a reward function returned values that are not finite: {bad}")
    return values


def _number(name: str, value: Any) -> float:
    """Numbers of Python and numpy and tensors of one element; text is a mistake even where it spells a number."""
    if not isinstance(value, str | bytes | bytearray):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
            pass
    raise ValueError(f"a reward function returned '{name}': {value!r:.80} ({type(value).__name__}), expected a number")
