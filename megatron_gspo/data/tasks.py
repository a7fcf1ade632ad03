"""Task generators: prompts with a verifiable answer, made at need. `data.source` names one, `data.args` sets it up."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

from megatron_gspo.data.gym import PREFIX, gym_task
from megatron_gspo.data.prompt import Prompt

Task = Callable[[int], Prompt]
"""The prompt with a given index >= 0; the same index gives the same prompt."""

TASKS: dict[str, Callable[..., Task]] = {}

REPLACEMENT_STRIDE = 2**40  # replacements are drawn from indices that no run's stream reaches


def register_task(name: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Decorates `make(*, seed, **args) -> Task` so that `data.source: name` finds it."""

    def register(make: Callable[..., Task]) -> Callable[..., Task]:
        assert name not in TASKS, f"task '{name}' is registered twice"
        TASKS[name] = make
        return make

    return register


def draw_from_task(name: str, seed: int, args: Mapping[str, Any]) -> Callable[[int, int], Prompt]:
    """Draws position p, attempt a from the task `name`. Raises ValueError for an unknown name or arguments."""
    task = gym_task(name.removeprefix(PREFIX), seed, args) if name.startswith(PREFIX) else _make(name, seed, args)
    return lambda position, attempt: task(position + attempt * REPLACEMENT_STRIDE)


def _make(name: str, seed: int, args: Mapping[str, Any]) -> Task:
    if name not in TASKS:
        valid = ", ".join(["jsonl", "parquet", *TASKS, f"{PREFIX}DATASET"])
        raise ValueError(f"data.source = '{name}': no such source; valid: {valid}")
    signature = inspect.signature(TASKS[name])
    try:
        signature.bind(seed=seed, **args)
    except TypeError as error:
        valid = ", ".join(parameter for parameter in signature.parameters if parameter != "seed")
        raise ValueError(f"data.args = {dict(args)}: {error}; '{name}' takes {valid}") from None
    return TASKS[name](seed=seed, **args)


@register_task("sort_digits")
def sort_digits(*, seed: int, length: int = 8) -> Task:
    """`31405>` is to be continued by `01345`: `length` random digits, repeats allowed, in ascending order."""
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"data.args.length = {length!r}: expected a whole number of digits, at least 1")

    def make(index: int) -> Prompt:
        digits = random.Random(f"sort_digits/{seed}/{index}").choices("0123456789", k=length)
        answer = "".join(sorted(digits))
        return Prompt(id=f"sort_digits/{index}", prompt="".join(digits) + ">", response=answer, meta={"answer": answer})

    return make
