"""The training loop: one named span per phase of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.config import OnNonFinite, PolicyObjective, Recipe
from megatron_gspo.loop.advantages import sequence_advantages
from megatron_gspo.loop.cut import Cut, cut_batch, gather_logp, make_plan, spread_logp
from megatron_gspo.loop.loss import MiniBatchTerms, make_loss, totals_of
from megatron_gspo.loop.on_policy import check_on_policy
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.loop.source import Batch, BatchSource, RecordedBatch
from megatron_gspo.loop.state import RunState, is_saved
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.step import Stepper, apply_gradients


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a step needs; put together once by the worker."""

    recipe: Recipe
    layout: Layout
    stepper: Stepper
    optimizer: Any
    scheduler: Any
    source: BatchSource
    stop: StopRequest
    device: torch.device
    control: dist.ProcessGroup  # gloo, all trainer ranks
    sync_weights: Callable[[int], None]  # collective; the servers hold this version afterwards
    save: Callable[[RunState, Tensor | None], Path]
    report: StepReport


def train(run: Run, state: RunState, old_logp: Tensor | None) -> RunState:
    """Train until the last step or until asked to stop; every checkpoint that is due is on disk at the end."""
    run.sync_weights(state.weight_version)
    run.report.begin()
    while state.step < run.recipe.run.steps and not run.stop.agreed():
        before = state
        state, old_logp = _step(run, state, old_logp)
        if state.mini_batch or state == before:
            break
        if run.recipe.run.save_every and state.step % run.recipe.run.save_every == 0:
            with run.report.span("save"):  # counts to the step that comes next
                run.save(state, None)
    if not is_saved(Path(run.recipe.run.dir), state):
        run.save(state, old_logp)
    return state


def _step(run: Run, state: RunState, old_logp: Tensor | None) -> tuple[RunState, Tensor | None]:
    """One step from `state`; left early, it returns the state to continue from and the old log-probabilities."""
    span = run.report.span
    record = Path(state.record) if state.record else None
    if record and not record.exists():
        raise ValueError(
            f"step {state.step} was left after {state.mini_batch} mini-batches and its rollouts {state.record} are "
            "gone: restore the folder, or remove the newest checkpoint to repeat the step from its beginning"
        )
    with span("rollout"):
        batch = RecordedBatch(record) if record else run.source.fetch(state.step, state.weight_version)
    if batch is None:
        return state, old_logp
    with span("pack"):
        plan = make_plan(batch.index, run.recipe.batch, run.layout, run.stepper.model.hf_config)
        cuts = cut_batch(batch, plan, run.layout, run.device)
    with span("score"):
        old = _old_logp(run, batch, cuts, old_logp)
    advantages = sequence_advantages(run.recipe, batch.index)
    for number in range(state.mini_batch, len(cuts)):
        if number > state.mini_batch and run.stop.agreed_expired():
            left = replace(state, mini_batch=number, record=str(batch.record) if batch.record else None)
            return left, None if old is None else gather_logp(cuts, old, batch.index, run.layout)
        with span("update"):
            _update(run, batch, cuts[number], None if old is None else old[number], advantages, check=number == 0)
    state = RunState(step=state.step + 1, weight_version=state.weight_version + 1)
    with span("sync"):
        run.sync_weights(state.weight_version)
    run.report.finish(state.step - 1, state.weight_version, batch.index, cuts, run.layout)
    return state, None


def _old_logp(run: Run, batch: Batch, cuts: list[Cut], saved: Tensor | None) -> list[list[Tensor]] | None:
    """The old policy's log-probabilities per mini-batch and micro-batch; None when the policy is its own old policy."""
    if saved is not None:
        return spread_logp(saved, batch, cuts, run.layout)
    objective = run.recipe.objective
    if len(cuts) == 1 or not isinstance(objective, PolicyObjective) or objective.anchored_to_rollout:
        return None
    return [[logp for logp, _ in run.stepper.score(cut.micro_batches)] for cut in cuts]


def _update(run: Run, batch: Batch, cut: Cut, old: list[Tensor] | None, advantages: Tensor, *, check: bool) -> None:
    rows = list(cut.plan.rows)
    terms = MiniBatchTerms(
        advantages=advantages,
        trained_lens=batch.index.trained_lens,
        old_logp=old,
        ref_logp=None,
        totals=totals_of(run.recipe, batch.index.trained_lens[rows]),
        cp_group=run.layout.pgs.cp,
    )
    metrics = run.stepper.forward_backward(cut.micro_batches, make_loss(run.recipe, terms), cut.num_tokens)
    if check and old is not None:
        check_on_policy(run.recipe.objective, metrics, run.control)
    skip = run.recipe.run.on_non_finite is OnNonFinite.skip
    norm, lr, applied = apply_gradients(run.optimizer, run.scheduler, skip_non_finite=skip)
    run.report.add(metrics, norm, lr, applied)
