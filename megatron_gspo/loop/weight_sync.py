"""After every step: new weights into the servers, then the probe, which both engines must score alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_gspo.config import Dtype, Recipe, Transport
from megatron_gspo.loop.probe import probe_tokens, score_probe
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.sampling import SamplerHandle
from megatron_gspo.policy.model import sync_parameters
from megatron_gspo.policy.step import Stepper
from megatron_gspo.rollout.control import Servers
from megatron_gspo.rollout.probe import check_probe, server_logprobs
from megatron_gspo.rollout.sync import WeightSync, together
from megatron_gspo.rollout.transport import DiskTransport, DistributedTransport
from megatron_gspo.weights.export import ExportPlan, buckets, gather
from megatron_gspo.weights.load import checkpoint_shapes
from megatron_gspo.weights.save import save_hf

MIB = 1024**2
PROBE_TOLERANCE = {Dtype.fp32: 1e-3, Dtype.bf16: 0.1}


def make_weight_sync(
    recipe: Recipe,
    stepper: Stepper,
    export: ExportPlan,
    sampler: SamplerHandle | None,
    control: dist.ProcessGroup,
    report: StepReport,
    device: torch.device,
) -> Callable[[int], None]:
    """A function that makes the servers hold the trainer's weights as the version that it is given; collective.

    It does nothing where no server takes part (sft, replay). Blocks until the servers are healthy.
    """
    if recipe.rollout is None or recipe.rollout.replay:
        return lambda version: None
    urls = _server_urls(sampler, control)
    config = recipe.rollout.sync
    servers = Servers(urls, config.timeout_s)
    transport: DistributedTransport | DiskTransport
    if config.transport is Transport.distributed:
        transport = DistributedTransport(
            servers,
            buckets(export, config.bucket_mb * MIB),
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

    return update


def _server_urls(sampler: SamplerHandle | None, control: dist.ProcessGroup) -> list[str]:
    box = [together(control, sampler.wait_ready if sampler else list)]
    dist.broadcast_object_list(box, 0, group=control)
    return box[0]
