"""Real gloo ranks, of which some have something to do for longer than any of their collectives may take."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_gspo.rollout import together as module
from megatron_gspo.rollout.sync import WeightSync
from megatron_gspo.rollout.together import UpdateFailed, together
from tests.ranks import run_ranks


def _group(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _one_is_slow() -> tuple[int, float]:
    module.HEARTBEAT_S = 0.3
    group, rank = _group(1.5), dist.get_rank()
    begin = time.monotonic()
    result = together(group, lambda: time.sleep(4.0 if rank == 1 else 0.0) or rank)
    return result, time.monotonic() - begin


def test_an_action_may_take_longer_than_a_collective():
    results = run_ranks(3, _one_is_slow)
    assert [result for result, _ in results] == [0, 1, 2]
    assert all(4.0 <= seconds < 6.0 for _, seconds in results)


def _slow_then_wrong() -> str:
    module.HEARTBEAT_S = 0.3
    group, rank = _group(1.5), dist.get_rank()

    def action():
        if rank == 1:
            time.sleep(2.5)
            raise KeyError("no such thing")

    with pytest.raises(UpdateFailed) as caught:
        together(group, action)
    assert together(group, lambda: "in step again") == "in step again"
    return str(caught.value)


def test_an_error_after_a_long_wait_is_raised_on_every_rank():
    assert run_ranks(2, _slow_then_wrong) == ["rank 1: KeyError: 'no such thing'"] * 2


def _dies() -> str:
    module.HEARTBEAT_S = 0.3
    group, rank = _group(2.0), dist.get_rank()
    if rank == 1:
        time.sleep(6.0)
        return "never came"
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        together(group, lambda: None)
    return f"noticed: {time.monotonic() - begin < 5.0}"


def test_a_rank_that_does_not_come_is_still_noticed():
    assert run_ranks(2, _dies)[0] == "noticed: True"


class FakeServers:
    urls = ("http://a:1", "http://b:1")

    def __init__(self, fails: str):
        self.fails = fails

    def __getattr__(self, name: str):
        def act(*_: object) -> None:
            if name == self.fails:
                raise RuntimeError(f"{name} was refused")

        return act


class FakeTransport:
    def __init__(self, servers: FakeServers, group: dist.ProcessGroup):
        self.servers, self.group = servers, group

    def begin(self, version: int) -> None:
        together(self.group, self.servers.begin)

    def push(self, version: int) -> None:
        together(self.group, self.servers.push)


def _update(fails: str) -> str:
    servers, group = FakeServers(fails), _group(30.0)
    with pytest.raises(UpdateFailed) as caught:
        WeightSync(servers, FakeTransport(servers, group), group).update(3)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("fails", "consequence"),
    [
        ("pause", "no weights were sent, and http://a:1, http://b:1 keep those before, perhaps paused"),
        ("begin", "no weights were sent, and http://a:1, http://b:1 keep those before, perhaps paused"),
        ("push", "http://a:1, http://b:1 stay paused with a mixture of old and new weights"),
        ("flush_cache", "http://a:1, http://b:1 hold the new weights, but perhaps stay paused"),
        ("resume", "http://a:1, http://b:1 hold the new weights, but perhaps stay paused"),
    ],
)
def test_a_failed_update_says_which_weights_the_servers_hold(fails, consequence):
    (message,) = run_ranks(1, _update, fails)
    expected = (
        f"weight update to version 3 failed; {consequence}: restart them. rank 0: RuntimeError: {fails} was refused"
    )
    assert message == expected
