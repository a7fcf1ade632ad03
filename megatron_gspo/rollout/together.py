"""What some ranks do while the others wait, without their wait ever looking like a rank that does not come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread

import torch
import torch.distributed as dist

# A collective fails after run.timeout_s, which is at least three times this.
HEARTBEAT_S = 10.0


class UpdateFailed(RuntimeError):
    """A weight update failed on some rank or server; raised on every rank, with the messages of those that failed."""


def together[T](group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run `action` on every rank of `group` (CPU tensors) and return its result; when it raises on one rank, raise
    UpdateFailed on all of them. Collective. `action` may take any time, and must not use `group`."""
    ended = Event()
    agreed = _on_thread(lambda: _all_ended(group, ended))
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    ended.set()
    agreed.result()
    messages: list[str | None] = [None] * dist.get_world_size(group)
    if not _anywhere(group, error is not None):
        return result
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}", group=group)
    raise UpdateFailed(
        "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message)
    ) from error


def _all_ended(group: dist.ProcessGroup, ended: Event) -> None:
    """Return once `ended` is set on every rank. Collective."""
    while True:
        ended.wait(HEARTBEAT_S)
        if not _anywhere(group, not ended.is_set()):
            return


def _anywhere(group: dist.ProcessGroup, mine: bool) -> bool:
    flag = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _on_thread(call: Callable[[], None]) -> Future[None]:
    """`call` on a daemon thread: an exception that ends the process must not wait for ranks that do not come."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="heartbeat", daemon=True).start()
    return future
