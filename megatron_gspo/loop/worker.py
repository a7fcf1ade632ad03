"""One trainer rank: puts a run together from its recipe, trains, exports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.config import Engine, Recipe, load_recipe
from megatron_gspo.loop.checkpoints import RunState
from megatron_gspo.loop.critic import build_critic
from megatron_gspo.loop.environment import Environment, read_environment
from megatron_gspo.loop.export import export_policy
from megatron_gspo.loop.reference import build_reference
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.rl import Run, train
from megatron_gspo.loop.run_lock import share
from megatron_gspo.loop.sampling import SamplerHandle
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.loop.source import BatchSource, GivenBatches, ReplayedBatches, SampledBatches
from megatron_gspo.loop.state import agreed_checkpoints, load_newest, save_checkpoint
from megatron_gspo.loop.weight_sync import make_weight_sync
from megatron_gspo.policy import cpu
from megatron_gspo.policy.checkpoint import load_model, save_model
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import build_model, ddp_config, read_hf_config, sync_parameters, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.routing import RoutingWatch
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.load import load_hf


def run(recipe: Recipe, environment: Environment, resume: bool, store: dist.Store | None = None) -> int:
    """Train `recipe` on this rank; returns the exit code. Collective over all trainer ranks.

    store: that of all ranks, where they have one already.
    """
    device = _init_distributed(recipe, environment, store)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=recipe.run.timeout_s))
    assert isinstance(control, dist.ProcessGroup)
    stop = StopRequest(control, recipe.run.grace_s)
    stop.install()
    report = StepReport(recipe, is_main=environment.rank == 0)
    with ExitStack() as cleanup:
        cleanup.callback(report.close)
        sampler = _start_sampler(recipe, report) if environment.rank == 0 else None
        if sampler:
            cleanup.callback(sampler.close)
        train_and_export(recipe, device, control, stop, report, sampler, resume)
    report.summary()
    dist.destroy_process_group()
    return 0


def train_and_export(
    recipe: Recipe,
    device: torch.device,
    control: dist.ProcessGroup,
    stop: StopRequest,
    report: StepReport,
    sampler: SamplerHandle | None,
    resume: bool,
) -> None:
    """Build the models, restore or load them, train, and export the policy after the last step. Collective."""
    run_dir, policy = Path(recipe.run.dir), recipe.policy
    layout = init_layout(policy.layout, seed=recipe.run.seed, timeout_s=recipe.run.timeout_s)
    model = build_model(read_hf_config(policy.hf, "policy.hf"), policy, layout)
    binding = bind(model.chunks, model.hf_config, layout.pgs)
    report.say(f"policy {policy.hf} on {layout.world} ranks: {_sizes(layout)}")
    whole = agreed_checkpoints(run_dir, control) if resume else []
    resume = bool(whole)  # stopped before its first: begin again
    if not resume:
        load_hf(policy.hf, binding)
    chunks = wrap(model, ddp_config(policy), layout)
    optimizer, scheduler = build_optimizer(recipe, chunks, layout)
    critic = build_critic(recipe, layout, load=not resume)
    reference = build_reference(recipe, layout)
    trained: dict[str, dict[str, Any]] = {"policy": {"chunks": chunks, "optimizer": optimizer, "scheduler": scheduler}}
    if critic:
        trained["critic"] = critic.trained
    state, scores = RunState(step=0, weight_version=0), dict[str, torch.Tensor]()
    if resume:
        loads = {name: partial(load_model, layout=layout, **parts) for name, parts in trained.items()}
        state, scores = load_newest(whole, loads)
        report.say(f"resuming at step {state.step}, mini-batch {state.mini_batch}")
    report.start(state)
    export = plan_export(binding)
    routing = RoutingWatch(chunks, layout) if recipe.observe.routing_changes else None
    stepper = Stepper(model, chunks, layout, recipe.rollout.temperature if recipe.rollout else 1.0, routing)

    def save(state: RunState, scores: Mapping[str, torch.Tensor]) -> Path:
        for parts in trained.values():
            sync_parameters(parts["chunks"])  # with overlap_param_gather they are those before the last update
        saves = {name: partial(save_model, layout=layout, **parts) for name, parts in trained.items()}
        return save_checkpoint(run_dir, state, saves, scores, keep=recipe.run.keep_checkpoints, group=control)

    served = make_weight_sync(recipe, stepper, export, sampler, control, stop, report, device)
    state = train(
        Run(
            recipe=recipe,
            layout=layout,
            stepper=stepper,
            optimizer=optimizer,
            scheduler=scheduler,
            critic=critic,
            reference=reference,
            source=_make_source(recipe, sampler, control, stop, report),
            stop=stop,
            device=device,
            control=control,
            sync_weights=served.update,
            save=save,
            report=report,
        ),
        state,
        scores,
    )
    served.close()
    if state.step < recipe.run.steps:
        report.say(f"stopped before step {state.step + 1} of {recipe.run.steps}; continue with --resume")
    elif recipe.run.export_hf:
        sync_parameters(chunks)
        report.say(f"trained policy: {export_policy(run_dir, export, policy.hf, state, control)}")


def _sizes(layout: Layout) -> str:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return " ".join(f"{name} {getattr(layout, name)}" for name in names if name != "vpp" or layout.vpp > 1)


def _init_distributed(recipe: Recipe, environment: Environment, store: dist.Store | None) -> torch.device:
    torch.manual_seed(recipe.run.seed)
    if cpu.on_gpu():
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        torch.set_num_threads(recipe.run.threads)
        device, backend = torch.device("cpu"), "gloo"
    url = f"tcp://{environment.master_addr}:{environment.master_port}"
    dist.init_process_group(
        backend,
        init_method=None if store else url,
        store=dist.PrefixStore("default_pg", store) if store else None,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=recipe.run.timeout_s),
    )
    return device


def _start_sampler(recipe: Recipe, report: StepReport) -> SamplerHandle | None:
    if recipe.rollout is None or recipe.rollout.replay:
        return None
    servers = "its server" if recipe.rollout.engine is Engine.managed else f"connecting to {recipe.rollout.urls}"
    report.say(f"starting the sampling process and {servers}; logs in {recipe.run.dir}/logs")
    return SamplerHandle(recipe, on_cpu=not cpu.on_gpu(), on_progress=report.sampling, on_stat=report.scalar)


def _make_source(
    recipe: Recipe,
    sampler: SamplerHandle | None,
    control: dist.ProcessGroup,
    stop: StopRequest,
    report: StepReport,
) -> BatchSource:
    if recipe.rollout is None:
        return GivenBatches(recipe, stop.agreed, report.scalar)
    if recipe.rollout.replay:
        return ReplayedBatches(Path(recipe.rollout.replay), recipe.batch)
    return SampledBatches(sampler, Path(recipe.run.dir) / "rollouts", control, lambda: stop.expired)


def run_or_leave(recipe: Recipe, environment: Environment, resume: bool, store: dist.Store | None = None) -> int:
    """`run`, but a rank that fails leaves at once: interpreter shutdown would wait for peers in a collective."""
    try:
        return run(recipe, environment, resume, store)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def main(recipe_path: str, resume: bool) -> int:
    """A worker process that our launcher started."""
    recipe, environment = load_recipe(recipe_path), read_environment()
    assert environment is not None, "a worker is started with RANK and WORLD_SIZE set"
    share(Path(recipe.run.dir))
    return run_or_leave(recipe, environment, resume)
