"""The training loop: one named span per phase of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.config import OnNonFinite, PolicyObjective, Recipe
from megatron_gspo.loop.advantages import Targets, make_targets
from megatron_gspo.loop.critic import Critic, make_value_loss
from megatron_gspo.loop.cut import Cut, cut_batch, gather_tokens, make_plan, spread_tokens
from megatron_gspo.loop.loss import MiniBatchTerms, make_loss, totals_of
from megatron_gspo.loop.on_policy import check_on_policy
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.loop.source import Batch, BatchSource, RecordedBatch
from megatron_gspo.loop.state import RunState, is_saved
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.step import Stepper, apply_gradients, leave_gradients


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a step needs; put together once by the worker."""

    recipe: Recipe
    layout: Layout
    stepper: Stepper
    optimizer: Any
    scheduler: Any
    critic: Critic | None
    reference: Stepper | None
    source: BatchSource
    stop: StopRequest
    device: torch.device
    control: dist.ProcessGroup  # gloo, all trainer ranks
    sync_weights: Callable[[int], None]  # collective; the servers hold this version afterwards
    save: Callable[[RunState, Mapping[str, Tensor]], Path]
    report: StepReport


# Per token and computed before a step's first update, by name ("old_logp", "ref_logp", "values"): [k][j] is [t] fp32
# for mini-batch k, micro-batch j on the last pipeline stage. A name that is missing was not needed.
Scores = Mapping[str, Sequence[Sequence[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is ready for its updates."""

    batch: Batch
    cuts: list[Cut]
    scores: Scores
    targets: Targets

    def score(self, name: str, number: int) -> Sequence[Tensor] | None:
        """The score `name` of mini-batch `number`, or None where there is none of that name."""
        return self.scores[name][number] if name in self.scores else None


def train(run: Run, state: RunState, saved: Mapping[str, Tensor]) -> RunState:
    """Train until the last step or until asked to stop; every checkpoint that is due is on disk at the end.

    saved: the scores of a step that was left half-way, each [total tokens of the batch].
    """
    run.sync_weights(state.weight_version)
    run.report.begin()
    while state.step < run.recipe.run.steps and not run.stop.agreed():
        before = state
        state, saved = _step(run, state, saved)
        if state.mini_batch or state == before:
            break
        if run.recipe.run.save_every and state.step % run.recipe.run.save_every == 0:
            with run.report.span("save"):  # counts to the step that comes next
                run.save(state, {})
    if not is_saved(Path(run.recipe.run.dir), state, run.control):
        run.save(state, saved)
    return state


def _step(run: Run, state: RunState, saved: Mapping[str, Tensor]) -> tuple[RunState, Mapping[str, Tensor]]:
    """One step from `state`; left early, it returns the state to continue from and the scores to continue with."""
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
        return state, saved
    with span("pack"):
        model = run.stepper.model
        further = model.config.mtp_num_layers or 0
        plan = make_plan(batch.index, run.recipe.batch, run.layout, model.hf_config, further)
        cuts = cut_batch(batch, plan, run.layout, run.device)
    with span("score"):
        scores = _scores(run, state, cuts, batch, saved)
        targets = make_targets(run.recipe, batch.index, cuts, scores.get("values", []), run.layout)
    step = Step(batch=batch, cuts=cuts, scores=scores, targets=targets)
    for number in range(state.mini_batch, len(cuts)):
        if number > state.mini_batch and run.stop.agreed_expired():
            left = replace(state, mini_batch=number, record=str(batch.record) if batch.record else None)
            return left, {name: gather_tokens(cuts, of, batch.index, run.layout) for name, of in scores.items()}
        with span("update"):
            _update_policy(run, step, number)
            if run.critic:
                _update_critic(run, run.critic, step, number)
    state = RunState(step=state.step + 1, weight_version=state.weight_version + 1)
    with span("sync"):
        run.sync_weights(state.weight_version)
    if run.stepper.routing:
        for name, share in run.stepper.routing.take(run.control).items():
            run.report.scalar(name, share)
    run.report.finish(state.step - 1, state.weight_version, batch.index, cuts, run.layout)
    return state, {}


def _scores(run: Run, state: RunState, cuts: list[Cut], batch: Batch, saved: Mapping[str, Tensor]) -> Scores:
    """What the models say of the batch before any of them changes."""
    objective, scorers = run.recipe.objective, dict[str, Callable[[list[Cut]], list[list[Tensor]]]]()
    # With one mini-batch the policy is its own old policy, and its update computes the same numbers.
    if len(cuts) > 1 and isinstance(objective, PolicyObjective) and not objective.anchored_to_rollout:
        scorers["old_logp"] = partial(_old_logp, run.stepper)
    if run.reference:
        scorers["ref_logp"] = partial(_logp, run.reference)
    if run.critic:
        scorers["values"] = run.critic.score
    if not state.mini_batch:
        return {name: score(cuts) for name, score in scorers.items()}
    # The models have moved since the step began: only what was saved is from before.
    if saved.keys() != scorers.keys():
        raise ValueError(
            f"step {state.step} was left after {state.mini_batch} mini-batches with scores {sorted(saved)}, but this "
            f"run needs {sorted(scorers)}: resume with what wrote the checkpoint, or remove it to repeat the step"
        )
    return {name: spread_tokens(flat, cuts, batch.index) for name, flat in saved.items()}


def _old_logp(policy: Stepper, cuts: list[Cut]) -> list[list[Tensor]]:
    with policy.routing.old() if policy.routing else nullcontext():
        return _logp(policy, cuts)


def _logp(stepper: Stepper, cuts: list[Cut]) -> list[list[Tensor]]:
    return [[logp for logp, _ in stepper.score(cut.micro_batches)] for cut in cuts]


def _update_policy(run: Run, step: Step, number: int) -> None:
    """One optimizer step of the policy on mini-batch `number`."""
    cut, trained_lens = step.cuts[number], step.batch.index.trained_lens
    old_logp, ref_logp = step.score("old_logp", number), step.score("ref_logp", number)
    totals = totals_of(run.recipe, trained_lens[list(cut.plan.rows)])
    terms = MiniBatchTerms(
        advantages=step.targets.advantages[number],
        trained_lens=trained_lens,
        old_logp=old_logp,
        ref_logp=ref_logp,
        totals=totals,
        cp_group=run.layout.pgs.cp,
    )
    routing = run.stepper.routing if number else None  # in the first mini-batch the policy is still the old one
    with routing.new() if routing else nullcontext():
        metrics = run.stepper.forward_backward(cut.micro_batches, make_loss(run.recipe, terms), cut.num_tokens)
    if number == 0 and old_logp is not None:
        check_on_policy(run.recipe.objective, metrics, run.control)
    run.report.add("policy", metrics, *_apply(run, run.optimizer, run.scheduler, "policy", totals.num_tokens))


def _update_critic(run: Run, critic: Critic, step: Step, number: int) -> None:
    """One optimizer step of the critic on mini-batch `number`."""
    assert run.recipe.critic is not None
    cut = step.cuts[number]
    num_tokens = int(step.batch.index.trained_lens[list(cut.plan.rows)].sum())
    loss = make_value_loss(
        step.scores["values"][number],
        step.targets.returns[number],
        num_tokens=num_tokens,
        clip=run.recipe.critic.clip,
        cp_group=run.layout.pgs.cp,
    )
    metrics = critic.stepper.forward_backward(cut.micro_batches, loss, cut.num_tokens)
    run.report.add("critic", metrics, *_apply(run, critic.optimizer, critic.scheduler, "critic", num_tokens))


def _apply(run: Run, optimizer: Any, scheduler: Any, what: str, num_tokens: int) -> tuple[float, float, bool]:
    """The optimizer step of `what` model on a mini-batch of which `num_tokens` train, over all ranks."""
    if num_tokens == 0:
        return leave_gradients(optimizer)
    skip = run.recipe.run.on_non_finite is OnNonFinite.skip
    return apply_gradients(optimizer, scheduler, skip_non_finite=skip, what=what)
