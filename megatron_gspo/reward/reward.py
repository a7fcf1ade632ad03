"""A reward as the sampler uses it: sync or async underneath, its result checked, its failures named."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, Protocol

import megatron_gspo.reward.builtin  # noqa: F401  (registers the rewards of ours)
from megatron_gspo.config.schema import RewardConfig
from megatron_gspo.reward.registry import find_reward
from megatron_gspo.reward.scores import check


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
    thread, so that a slow reward never holds up generation.

    Past `config.timeout_s` a coroutine is cancelled. A thread cannot be: it runs on, with what it holds, until it
    returns or the process ends, which does not wait for it.
    """

    def __init__(self, config: RewardConfig):
        """Raises ValueError where `config.name` or `config.args` mean no function, see `find_reward`."""
        self._name = config.name
        self._timeout_s = config.timeout_s
        self._function = partial(find_reward(config.name, config.args), **config.args)
        self._calls = itertools.count()
        self._running: dict[int, tuple[str, float]] = {}

    async def __call__(self, prompt: Asked, response: str) -> dict[str, float]:
        """{"reward": value, further metrics}, all finite. Raises what the function raises, TimeoutError past
        `timeout_s`, and ValueError for a result that is none; a note on the exception names the prompt."""
        number = next(self._calls)
        self._running[number] = prompt.id, time.monotonic()
        try:
            return check(await self._within_timeout(prompt, response))
        except Exception as error:
            error.add_note(f"in the reward '{self._name}', on prompt {prompt.id}")
            raise
        finally:
            del self._running[number]

    def running(self) -> list[tuple[str, float]]:
        """(prompt id, seconds so far) of the rewards being computed, the longest first."""
        now = time.monotonic()
        return [(prompt_id, now - started) for prompt_id, started in self._running.values()]

    async def _within_timeout(self, prompt: Asked, response: str) -> Any:
        call = partial(self._function, prompt=prompt.prompt, response=response, meta=prompt.meta)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                if inspect.iscoroutinefunction(self._function):
                    return await call()
                result = await asyncio.wrap_future(_on_daemon_thread(call))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError:
            if not limit.expired():  # the function's own
                raise
            raise TimeoutError(
                f"the reward took longer than reward.timeout_s = {self._timeout_s:g}; raise it if it is only slow"
            ) from None


def _on_daemon_thread(call: Callable[[], Any]) -> Future[Any]:
    """`call` on a thread of its own. A pool would wait for a call that never returns: in the queue behind it, and when
    the process ends."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = call()
        except StopIteration as error:  # no future takes one (asyncio would wait for ever); PEP 479's way out
            raised = RuntimeError(f"the reward function raised {error!r}")
            raised.__cause__ = error
            _settle(future, partial(future.set_exception, raised))
        except BaseException as error:
            _settle(future, partial(future.set_exception, error))
        else:
            _settle(future, partial(future.set_result, result))

    Thread(target=run, name="reward", daemon=True).start()
    return future


def _settle(future: Future[Any], settle: Callable[[], None]) -> None:
    # From here on the future cannot be cancelled; one that was, by the time limit, has nobody who waits.
    if future.set_running_or_notify_cancel():
        settle()
