"""One trainer rank: puts a run together from its recipe, trains, exports. `python -m megatron_gspo.loop.worker RECIPE`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

from megatron_gspo.config import Recipe, load_recipe
from megatron_gspo.loop.environment import Environment, read_environment
from megatron_gspo.policy import cpu

cpu.install()  # before anything imports Megatron

import torch
import torch.distributed as dist

from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.rl import Run, train
from megatron_gspo.loop.sampling import SamplerHandle
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.loop.source import BatchSource, GivenBatches, ReplayedBatches, SampledBatches
from megatron_gspo.loop.state import RunState, load_newest, save_checkpoint
from megatron_gspo.loop.weight_sync import make_weight_sync
from megatron_gspo.policy.checkpoint import load_policy, save_policy
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import Model, build_model, ddp_config, sync_parameters, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights import bind, load_hf, plan_export, save_hf


def run(recipe: Recipe, environment: Environment, resume: bool) -> int:
    """Train `recipe` on this rank; returns the exit code. Collective over all trainer ranks."""
    device = _init_distributed(recipe, environment)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=recipe.run.timeout_s))
    stop = StopRequest(control, recipe.run.grace_s)
    stop.install()
    report = StepReport(recipe, is_main=environment.rank == 0, resume=resume)
    with ExitStack() as cleanup:
        cleanup.callback(report.close)
        sampler = _start_sampler(recipe, environment.rank, report)
        if sampler:
            cleanup.callback(sampler.close)
        layout = init_layout(recipe.policy.layout)
        report.attach(layout, control)
        model = build_model(_hf_config(recipe), recipe.policy, layout)
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        if not resume:
            load_hf(recipe.policy.hf, binding)
        chunks = wrap(model, ddp_config(recipe.policy), layout)
        optimizer, scheduler = build_optimizer(recipe, chunks, layout)
        state, old_logp = RunState(step=0, weight_version=0), None
        if resume:
            restore = partial(
                load_policy, chunks=chunks, optimizer=optimizer, scheduler=scheduler, layout=layout
            )
            state, old_logp = load_newest(Path(recipe.run.dir), restore)
        temperature = recipe.rollout.temperature if recipe.rollout else 1.0
        stepper = Stepper(model, chunks, layout, temperature)
        export = plan_export(binding)
        report.start(state)
        save = partial(save_policy, chunks=chunks, optimizer=optimizer, scheduler=scheduler, layout=layout)
        state = train(
            Run(
                recipe=recipe,
                layout=layout,
                stepper=stepper,
                optimizer=optimizer,
                scheduler=scheduler,
                source=_make_source(recipe, sampler, control, stop),
                stop=stop,
                device=device,
                control=control,
                sync_weights=make_weight_sync(recipe, stepper, export, sampler, control, report, device),
                save=lambda state, old: save_checkpoint(
                    Path(recipe.run.dir), state, save, old, keep=recipe.run.keep_checkpoints, group=control
                ),
                report=report,
            ),
            state,
            old_logp,
        )
        if state.step == recipe.run.steps and recipe.run.export_hf:
            sync_parameters(chunks)
            save_hf(Path(recipe.run.dir) / "hf", export, Path(recipe.policy.hf))
        report.summary(state)
    dist.destroy_process_group()
    return 0


def _init_distributed(recipe: Recipe, environment: Environment) -> torch.device:
    torch.manual_seed(recipe.run.seed)
    if cpu.on_gpu():
        device = torch.device("cuda", environment.local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        torch.set_num_threads(recipe.run.threads)
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{environment.master_addr}:{environment.master_port}",
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=recipe.run.timeout_s),
    )
    return device


def _hf_config(recipe: Recipe) -> dict:
    path = Path(recipe.policy.hf) / "config.json"
    if not path.exists():
        raise ValueError(f"policy.hf: {path} does not exist; expected the directory of an HF checkpoint")
    return json.loads(path.read_text())


def _start_sampler(recipe: Recipe, rank: int, report: StepReport) -> SamplerHandle | None:
    if recipe.rollout is None or recipe.rollout.replay or rank != 0:
        return None
    return SamplerHandle(recipe, report.sampling_progress)


def _make_source(
    recipe: Recipe, sampler: SamplerHandle | None, control: dist.ProcessGroup, stop: StopRequest
) -> BatchSource:
    if recipe.rollout is None:
        return GivenBatches(recipe)
    if recipe.rollout.replay:
        return ReplayedBatches(Path(recipe.rollout.replay))
    return SampledBatches(sampler, Path(recipe.run.dir) / "rollouts", control, lambda: stop.expired)


def main(argv: list[str] | None = None) -> int:
    """Entry point of a worker process that torchrun, srun or our launcher started."""
    parser = argparse.ArgumentParser(description="One trainer rank (started by megatron-gspo train)")
    parser.add_argument("recipe")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args(argv)
    environment = read_environment()
    assert environment is not None, "a worker is started with RANK and WORLD_SIZE set"
    return run(load_recipe(arguments.recipe), environment, arguments.resume)


if __name__ == "__main__":
    # A failing rank leaves at once: waiting in interpreter shutdown for peers that wait in a collective would hang.
    try:
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    sys.exit(code)
