"""Waiting for servers on real gloo ranks; the servers themselves take part in test_end_to_end.py."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_gspo.loop import weight_sync
from megatron_gspo.loop.sampling import SamplerFailed
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.rollout.together import UpdateFailed
from tests.ranks import run_ranks


class Starting:
    """A sampling process whose servers are healthy after some seconds, or never start."""

    def __init__(self, seconds: float, fails: bool = False):
        self.ready_at = time.monotonic() + seconds
        self.fails = fails

    def wait_ready(self, seconds: float) -> list[str]:
        time.sleep(min(seconds, max(0.0, self.ready_at - time.monotonic())))
        if time.monotonic() < self.ready_at:
            return []
        if self.fails:
            raise SamplerFailed("the SGLang server ended with exit code 1")
        return ["http://a:1"]


def _wait(seconds: float, *, fails: bool = False, asked_on: int | None = None) -> list[str] | str:
    weight_sync.STOP_POLL_S = 0.3
    control, rank = dist.new_group(backend="gloo", timeout=timedelta(seconds=2.0)), dist.get_rank()
    stop = StopRequest(control, grace_s=300.0)
    stop.install()
    if rank == asked_on:
        os.kill(os.getpid(), signal.SIGTERM)
    sampler = Starting(seconds, fails) if rank == 0 else None
    try:
        return weight_sync._server_urls(sampler, control, stop)
    except UpdateFailed as error:
        return str(error)


def test_a_server_may_start_for_longer_than_a_collective_may_take():
    assert run_ranks(2, _wait, 5.0) == [["http://a:1"]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_asked_to_stop_while_its_server_starts_stops_at_once(rank):
    begin = time.monotonic()
    assert run_ranks(2, _stopped, rank) == [[], []]
    assert time.monotonic() - begin < 30


def _stopped(rank: int) -> list[str] | str:
    return _wait(600.0, asked_on=rank)


def test_a_server_that_does_not_start_fails_every_rank():
    assert run_ranks(2, _failing) == ["rank 0: SamplerFailed: the SGLang server ended with exit code 1"] * 2


def _failing() -> list[str] | str:
    return _wait(0.5, fails=True)
