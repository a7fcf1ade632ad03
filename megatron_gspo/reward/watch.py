"""Says which rewards are slow while a batch waits for them."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from megatron_gspo.reward.reward import Reward

EVERY_S = 60.0
NAMED = 3
# Without a sign of life from the event loop for so long, one reward holds it up, or the interpreter's lock.
STUCK_S = 3 * EVERY_S


@asynccontextmanager
async def watched(reward: Reward, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Inside, a line to `say` every EVERY_S seconds names the rewards that have run longest, if any ran that long.

    A coroutine that blocks, or a function that keeps the interpreter's lock (as `re` does while it backtracks), stops
    that too: then Python prints to stderr, every STUCK_S seconds, where each thread stands.
    """
    watch = asyncio.create_task(_watch(reward, say))
    try:
        yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        faulthandler.cancel_dump_traceback_later()


async def _watch(reward: Reward, say: Callable[[str], None]) -> None:
    while True:
        faulthandler.dump_traceback_later(STUCK_S, repeat=True)
        await asyncio.sleep(EVERY_S)
        slow = [(prompt_id, seconds) for prompt_id, seconds in reward.running() if seconds >= EVERY_S]
        if slow:
            longest = ", ".join(f"{prompt_id} for {seconds:.0f} s" for prompt_id, seconds in slow[:NAMED])
            say(f"[reward] {len(slow)} running for {EVERY_S:g} s and more; the longest: on prompt {longest}")
