"""The sampling process: owns the SGLang servers, turns prompts into recorded batches with rewards.

It runs beside trainer rank 0, which asks for one batch at a time over a pipe; the batch itself goes to disk, from where
each rank reads its own rows. It ends, and with it the servers, when the pipe closes.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_gspo.config import Engine, Recipe
from megatron_gspo.loop.run_lock import share
from megatron_gspo.loop.stop_signals import STOP_SIGNALS
from megatron_gspo.rollout.server import ManagedServer


class SamplerFailed(RuntimeError):
    """The sampling process failed or died; the message holds its traceback."""


class SamplerHandle:
    """Rank 0's end of the pipe to the sampling process."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        on_cpu: bool,
        on_progress: Callable[[int, int], None],
        on_stat: Callable[[str, float], None],
    ):
        # spawn: the process must not inherit the trainer's torch.distributed state
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(recipe, on_cpu, theirs), name="sampler", daemon=False)
        self._process.start()
        theirs.close()
        self._on_progress = on_progress
        self._on_stat = on_stat

    def wait_ready(self, seconds: float) -> list[str]:
        """The URLs of the servers once they are healthy; none if they are not after `seconds`. Raises SamplerFailed."""
        deadline = time.monotonic() + seconds
        return self._receive("ready", lambda: time.monotonic() > deadline).get("urls", [])

    def request(self, step: int, weight_version: int, record: Path) -> None:
        """Ask for the batch of `step`, to be written to `record`."""
        self._pipe.send({"sample": step, "weight_version": weight_version, "record": str(record)})

    def wait_recorded(self, seconds: float, expired: Callable[[], bool]) -> bool:
        """Whether the requested batch is there, after at most `seconds` or until `expired()`. Raises SamplerFailed."""
        deadline = time.monotonic() + seconds
        reply = self._receive("recorded", lambda: expired() or time.monotonic() > deadline)
        for name, value in reply.get("stats", {}).items():
            self._on_stat(name, value)
        return bool(reply)

    def close(self) -> None:
        """End the process and its servers, and wait for both."""
        self._pipe.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self, kind: str, expired: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        while not expired():
            if not self._pipe.poll(0.05):
                if not self._process.is_alive() and not self._pipe.poll(0):
                    raise SamplerFailed(f"the sampling process died with exit code {self._process.exitcode}")
                continue
            try:
                message = self._pipe.recv()
            except EOFError:
                self._process.join(5)
                raise SamplerFailed(f"the sampling process ended: exit code {self._process.exitcode}") from None
            if message["kind"] == "failed":
                raise SamplerFailed(message["traceback"])
            if message["kind"] == "progress":
                self._on_progress(message["done"], message["total"])
            elif message["kind"] == kind:
                return message
        return {}


def _main(recipe: Recipe, on_cpu: bool, pipe: Connection) -> None:
    # Stop signals are the trainer's to act on; this process ends when the pipe closes. They are handled by doing
    # nothing rather than ignored, for the server's supervisor would inherit that, and is stopped by SIGTERM.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    try:
        _serve(recipe, on_cpu, pipe)
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:
        pipe.send({"kind": "failed", "traceback": traceback.format_exc()})
        raise


@contextmanager
def _told_of(servers: Iterable[ManagedServer]) -> Iterator[None]:
    """An exception inside also tells how the servers ended that have: they may be its cause."""
    try:
        yield
    except Exception as error:
        for ended in filter(None, (server.last_words() for server in servers)):
            error.add_note(ended)
        raise


def _serve(recipe: Recipe, on_cpu: bool, pipe: Connection) -> None:
    from megatron_gspo.loop.rollout_batch import BatchSampler, start_servers

    assert recipe.rollout is not None
    share(Path(recipe.run.dir))
    with ExitStack() as stack:
        servers = start_servers(recipe, on_cpu) if recipe.rollout.engine is Engine.managed else []
        for server in servers:
            stack.callback(server.stop)
        sampler = BatchSampler(recipe)
        for server in servers:
            server.wait_healthy(watch=pipe)
        urls = [server.url for server in servers] or list(recipe.rollout.urls)
        pipe.send({"kind": "ready", "urls": urls})
        while True:
            request = pipe.recv()
            with _told_of(servers):
                stats = sampler.sample(
                    urls,
                    request["sample"],
                    request["weight_version"],
                    Path(request["record"]),
                    lambda done, total: pipe.send({"kind": "progress", "done": done, "total": total}),
                )
            pipe.send({"kind": "recorded", "stats": stats})
