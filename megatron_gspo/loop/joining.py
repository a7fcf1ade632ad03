"""Ranks that torchrun or srun started agree whether the run begins, so that none waits for one that was refused."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from megatron_gspo.config import RecipeError
from megatron_gspo.loop.environment import Environment

REFUSED, FAILED = 2, 1  # exit codes
HEARD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rank has to say before the run: `code` is the exit code that it would leave with, None to go on."""

    code: int | None = None
    text: str = ""


GO_ON = Verdict()


def verdict_of(check: Callable[[], Verdict]) -> Verdict:
    """What `check` says; a RecipeError is a refusal, and whatever else it raises a failure: the others wait for a
    verdict until their time limit."""
    try:
        return check()
    except RecipeError as error:
        return Verdict(code=REFUSED, text=f"megatron-gspo: refused\n{error}")
    except Exception:
        return Verdict(code=FAILED, text=traceback.format_exc())


def open_store(environment: Environment, timeout_s: float) -> Any:
    """The key-value store (torch.distributed.Store) of all ranks. Collective: returns when every rank is there."""
    from torch.distributed import rendezvous

    url = f"tcp://{environment.master_addr}:{environment.master_port}"
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous(url, environment.rank, environment.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def agree(store: Any, environment: Environment, question: str, mine: Verdict) -> Verdict:
    """The verdict of all ranks on `question` (each is asked once): rank 0's, or else the first that would leave.

    Collective. Rank 0, whose process may hold the store, returns when the others have heard a verdict to leave.
    """
    from torch.distributed import DistStoreError

    others = range(1, environment.world_size)
    if environment.rank:
        store.set(f"{question}/{environment.rank}", json.dumps(asdict(mine)))
        joint = _read(store, question)
        store.set(f"{question}/heard/{environment.rank}", "")
        return joint
    found = {rank: _read(store, f"{question}/{rank}") for rank in others}
    leaving = [(rank, verdict) for rank, verdict in found.items() if verdict.code is not None]
    joint = mine
    if mine.code is None and leaving:
        rank, verdict = leaving[0]
        joint = Verdict(code=verdict.code, text=f"{verdict.text}\n(on rank {rank})")
    store.set(question, json.dumps(asdict(joint)))
    if joint.code is not None:
        with contextlib.suppress(DistStoreError):  # a rank that died meanwhile
            store.wait([f"{question}/heard/{rank}" for rank in others], timedelta(seconds=HEARD_S))
    return joint


def _read(store: Any, key: str) -> Verdict:
    return Verdict(**json.loads(store.get(key)))
