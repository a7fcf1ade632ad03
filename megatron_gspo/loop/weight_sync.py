"""After every step: new weights into the servers, then the probe, which both engines must score alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_gspo.config import Dtype, Engine, Mtp, Recipe, Transport
from megatron_gspo.config.replay import idle_in_replay
from megatron_gspo.loop.probe import probe_tokens, score_probe
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.rollout_batch import SERVER_LOG
from megatron_gspo.loop.sampling import SamplerHandle
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.policy.model import sync_parameters
from megatron_gspo.policy.step import Stepper
from megatron_gspo.rollout.control import Servers
from megatron_gspo.rollout.probe import check_probe, server_logprobs
from megatron_gspo.rollout.sync import WeightSync
from megatron_gspo.rollout.together import UpdateFailed, together
from megatron_gspo.rollout.transport import DiskTransport, DistributedTransport
from megatron_gspo.weights.export import ExportPlan, buckets, gather
from megatron_gspo.weights.load import checkpoint_shapes
from megatron_gspo.weights.save import save_hf

MIB = 1024**2
STOP_POLL_S = 1.0  # while servers start
PROBE_TOLERANCE = {Dtype.fp32: 1e-3, Dtype.bf16: 0.1}


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """The servers' weights; both are collective over the trainer ranks.

    update: make the servers hold the trainer's weights as the version that it is given, and compare the two.
    close: leave servers that outlive the run; says so where that fails, since nothing depends on it.
    """

    update: Callable[[int], None]
    close: Callable[[], None]


NO_SERVER = ServedWeights(update=lambda version: None, close=lambda: None)


def make_weight_sync(
    recipe: Recipe,
    stepper: Stepper,
    export: ExportPlan,
    sampler: SamplerHandle | None,
    control: dist.ProcessGroup,
    stop: StopRequest,
    report: StepReport,
    device: torch.device,
) -> ServedWeights:
    """Connects to the servers once they are healthy. Collective over the trainer ranks.

    Nothing is served where no server takes part (sft, replay), nor when the run is asked to stop while they start.
    """
    if recipe.rollout is None:
        return NO_SERVER
    if recipe.rollout.replay:
        idle = ", ".join(idle_in_replay(recipe))
        report.say(f"replay of {recipe.rollout.replay}: no server" + (f"; without effect: {idle}" if idle else ""))
        return NO_SERVER
    urls = _server_urls(sampler, control, stop)
    if not urls:
        return NO_SERVER
    config = recipe.rollout.sync
    if recipe.policy.mtp is Mtp.train:
        report.say("multi-token-prediction layers train, and are not sent to servers: only checkpoints have them")
    servers = Servers(urls, config.timeout_s)
    transport: DistributedTransport | DiskTransport
    if config.transport is Transport.distributed:
        transport = DistributedTransport(
            servers,
            buckets(export.served(), config.bucket_mb * MIB),
            gather,
            expected=checkpoint_shapes(recipe.policy.hf, export.binding),
            backend="nccl" if device.type == "cuda" else "gloo",
            group=control,
        )
    else:
        transport = DiskTransport(
            servers,
            lambda path: save_hf(path, export, Path(recipe.policy.hf)),
            directory=Path(recipe.run.dir),
            group=control,
        )
    sync = WeightSync(servers, transport, control)
    sync.connect()
    tokens = probe_tokens(recipe)
    tolerance = PROBE_TOLERANCE[recipe.policy.dtype] if config.probe_tolerance is None else config.probe_tolerance

    def update(version: int) -> None:
        sync_parameters(stepper.chunks)
        sync.update(version)
        ours = score_probe(stepper, tokens, stepper.layout, device)

        def compare() -> None:
            if dist.get_rank(control) != 0:
                return
            worst = 0.0
            for url in urls:
                theirs = server_logprobs(url, tokens.tolist(), timeout_s=config.timeout_s)
                found = check_probe(ours, theirs, tolerance=tolerance, version=version, url=url)
                worst = max(worst, found)
            report.scalar("rollout/probe_max_difference", worst)

        together(control, compare)

    def close() -> None:
        try:
            sync.close()
        except UpdateFailed as error:
            report.say(f"could not leave the servers, which is harmless to them: {error}")

    def update_managed(version: int) -> None:
        try:
            update(version)
        except UpdateFailed as error:
            error.add_note(f"the managed server restarts with the run; it logs to {recipe.run.dir}/{SERVER_LOG}")
            raise

    if recipe.rollout.engine is Engine.managed:  # it ends with the run
        return ServedWeights(update=update_managed, close=lambda: None)
    return ServedWeights(update=update, close=close)


def _server_urls(sampler: SamplerHandle | None, control: dist.ProcessGroup, stop: StopRequest) -> list[str]:
    """The servers' URLs once they are healthy, the same on all ranks; none when the run is asked to stop before.
    Collective."""
    while True:
        box = [together(control, lambda: sampler.wait_ready(STOP_POLL_S) if sampler else [])]
        dist.broadcast_object_list(box, 0, group=control)
        if box[0] or stop.agreed():
            return box[0]
