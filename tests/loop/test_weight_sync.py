"""Waiting for servers, and leaving them, on real gloo ranks; the servers themselves take part in test_end_to_end.py."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.config import load_recipe
from megatron_gspo.loop import weight_sync
from megatron_gspo.loop.sampling import SamplerFailed
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.loop.weight_sync import ServedWeights
from megatron_gspo.rollout.control import ServerError
from megatron_gspo.rollout.together import UpdateFailed, together
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


# ---- leaving servers


def _served(transport: Leaving, engine: str, directory: Path, say=None) -> ServedWeights:
    """What `make_weight_sync` makes over `transport`, for a server that is not there."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    transport.group = control
    for name in ("buckets", "checkpoint_shapes", "probe_tokens"):
        setattr(weight_sync, name, lambda *_: None)
    weight_sync.DistributedTransport = lambda *_, **__: transport
    weight_sync._server_urls = lambda *_: ["http://127.0.0.1:1"]
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.replace("ENGINE", engine))
    return weight_sync.make_weight_sync(
        load_recipe(path),
        stepper=SimpleNamespace(chunks=[]),
        export=SimpleNamespace(binding=None, served=lambda: None),
        sampler=None,
        control=control,
        stop=None,
        report=SimpleNamespace(say=say),
        device=torch.device("cpu"),
    )


def _leave(transport: Leaving, engine: str, directory: Path) -> tuple[int, list[str]]:
    """How often closing the served weights closes the transport, and what is said."""
    said: list[str] = []
    _served(transport, engine, directory, said.append).close()
    return transport.closed, said


def _update(engine: str, directory: Path) -> list[str]:
    """The notes on an update that fails."""
    with pytest.raises(UpdateFailed, match="pause_generation failed after") as caught:
        _served(Leaving(), engine, directory).update(1)
    return getattr(caught.value, "__notes__", [])


RECIPE = """
run: {dir: runs/x, steps: 5}
policy: {hf: no/such, optimizer: {lr: 1e-4}}
objective: {name: gspo}
advantage: {}
batch: {prompts: 4, samples: 4}
data: {source: sort_digits}
rollout: {max_new_tokens: 12, ENGINE}
reward: {name: sort_digits}
"""
EXTERNAL = "engine: external, urls: ['http://a:1']"


class Leaving:
    """A transport that is closed, or cannot be on rank 0."""

    def __init__(self, refused: bool = False):
        self.group: dist.ProcessGroup | None = None
        self.refused = refused
        self.closed = 0

    def connect(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1
        together(self.group, self._leave)

    def _leave(self) -> None:
        if self.refused and dist.get_rank() == 0:
            raise ServerError("http://a:1/destroy_weights_update_group did not answer within 600 s")


def test_an_update_that_fails_says_where_a_managed_server_logs(tmp_path):
    note = "the managed server restarts with the run; it logs to runs/x/logs/server_0.log"
    assert run_ranks(2, _update, "engine: managed", tmp_path) == [[note]] * 2
    assert run_ranks(2, _update, EXTERNAL, tmp_path) == [[]] * 2


def test_servers_that_outlive_the_run_are_left_at_its_end(tmp_path):
    assert run_ranks(2, _leave, Leaving(), EXTERNAL, tmp_path) == [(1, [])] * 2


def test_a_managed_server_ends_with_the_run_and_is_not_left(tmp_path):
    assert run_ranks(2, _leave, Leaving(), "engine: managed", tmp_path) == [(0, [])] * 2


def test_a_server_that_cannot_be_left_is_told_and_fails_no_run(tmp_path):
    """By then everything is trained, but the export is still to come."""
    message = (
        "could not leave the servers, which is harmless to them: rank 0: ServerError: "
        "http://a:1/destroy_weights_update_group did not answer within 600 s"
    )
    assert run_ranks(2, _leave, Leaving(refused=True), EXTERNAL, tmp_path) == [(1, [message])] * 2
