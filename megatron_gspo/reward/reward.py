"""A reward as the sampler uses it: sync or async underneath, its result checked, its failures named."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import megatron_gspo.reward.builtin  # noqa: F401  (registers the rewards of ours)
from megatron_gspo.config.schema import RewardConfig
from megatron_gspo.reward.registry import find_reward

RESERVED = {"mean", "std", "zero_variance_groups", "errors", "overlong"}


class Asked(Protocol):
    """What a reward learns about the prompt of a response."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> str | list[dict[str, Any]]: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...


class Reward:
    """The reward function that a recipe names. A coroutine function is awaited on the event loop; a plain one runs on a
    thread, so that a slow reward never holds up generation."""

    def __init__(self, config: RewardConfig):
        """Raises ValueError where `config.name` or `config.args` mean no function, see `find_reward`."""
        self._name = config.name
        self._function = partial(find_reward(config.name, config.args), **config.args)
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="reward")

    async def __call__(self, prompt: Asked, response: str) -> dict[str, float]:
        """{"reward": value, further metrics}, all finite. Raises what the function raises, and ValueError for a result
        that is none; a note on the exception names the prompt."""
        call = partial(self._function, prompt=prompt.prompt, response=response, meta=prompt.meta)
        try:
            if inspect.iscoroutinefunction(self._function):
                return check(await call())
            result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
            return check(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            error.add_note(f"in the reward '{self._name}', on prompt {prompt.id}")
            raise


def check(scores: Any) -> dict[str, float]:
    """What a reward function returned, as floats. ValueError unless there is a reward and everything is finite."""
    named = scores if isinstance(scores, Mapping) else {"reward": scores}
    values = {name: float(value) for name, value in named.items()}
    if "reward" not in values:
        raise ValueError(f"a reward function returned {values}, which has no 'reward'")
    if taken := RESERVED & values.keys():
        raise ValueError(
            f"a reward function returned {sorted(taken)}: names of metrics that every run has; rename them"
        )
    if bad := {name: value for name, value in values.items() if not math.isfinite(value)}:
        raise ValueError(f"a reward function returned values that are not finite: {bad}")
    return values
