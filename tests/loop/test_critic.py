"""The critic of PPO: the same on every layout, resumed bit for bit, and never a part of the policy.

Tolerances are those of test_layouts.py, for the same reasons: AdamW's eps is 1e-2, values and metrics are compared to
2e-5 and weights after two steps of lr 1e-2 to 2e-6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron_gspo.config import (
    BatchConfig,
    CriticConfig,
    Dtype,
    GaeConfig,
    LayoutConfig,
    OptimizerSection,
    PolicyConfig,
    PpoConfig,
    Recipe,
    RecipeError,
    RunConfig,
    Schedule,
    validate,
)
from megatron_gspo.loop import worker
from megatron_gspo.loop.advantages import Targets, make_targets
from megatron_gspo.loop.critic import Critic, build_critic, critic_policy, make_value_loss
from megatron_gspo.loop.cut import Cut, cut_batch, gather_tokens, make_plan, spread_tokens
from megatron_gspo.loop.state import whole_checkpoints
from megatron_gspo.objective import gae, merge, reduce_metrics
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import read_hf_config
from megatron_gspo.policy.step import apply_gradients
from tests.loop.batches import PROMPTS, SAMPLES, make_batch, write_records
from tests.loop.test_resume import outcome, recipe_file, run_once
from tests.loop.tiny import tiny_checkpoint
from tests.policy.tiny import global_tensors, local_tensors
from tests.ranks import run_ranks

CLIP = 0.02
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2_etp2": (2, {"tp": 2, "etp": 2}),
    "tp2_cp2_pp2_ep4": (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    return write_records(tmp_path_factory.mktemp("records"), 3)


def recipe_for(checkpoint: Path, max_tokens: int = 160, distributed: bool = True, **layout: int) -> Recipe:
    return Recipe(
        run=RunConfig(dir="unused", steps=1),
        policy=PolicyConfig(
            hf=str(checkpoint),
            dtype=Dtype.fp32,
            layout=LayoutConfig(**layout),
            optimizer=OptimizerSection(lr=3e-4, eps=1e-2, weight_decay=0.01, distributed=distributed),
        ),
        objective=PpoConfig(),
        advantage=GaeConfig(gamma=0.99, lam=0.9),
        critic=CriticConfig(lr=1e-2, clip=CLIP),
        batch=BatchConfig(prompts=PROMPTS, samples=SAMPLES, mini_batches=2, max_tokens=max_tokens),
    )


@dataclass(frozen=True)
class Outcome:
    values: torch.Tensor  # [tokens of the batch], with a head that is not 0
    advantages: torch.Tensor
    metrics: list[dict[str, float]]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def set_heads(critic: Critic) -> None:
    """The same non-zero head on every layout, as if it had been trained."""
    for chunk in critic.stepper.model.chunks:
        if chunk.post_process:
            chunk.output_layer.weight.data.copy_(0.05 * torch.linspace(-1, 1, 64)[None])
    critic.optimizer.reload_model_params()


def prepared(recipe: Recipe) -> tuple[Critic, list[Cut], list[list[torch.Tensor]], Targets, Layout]:
    layout = init_layout(recipe.policy.layout)
    critic = build_critic(recipe, layout, load=True)
    assert critic is not None
    set_heads(critic)
    batch, hf_config = make_batch(), read_hf_config(recipe.policy.hf, "policy.hf")
    cuts = cut_batch(batch, make_plan(batch.index, recipe.batch, layout, hf_config), layout, torch.device("cpu"))
    values = critic.score(cuts)
    return critic, cuts, values, make_targets(recipe, batch.index, cuts, values, layout), layout


def one_step(recipe: Recipe):
    """What the loop does with the critic, on this rank; parameters as `local_tensors`."""
    critic, cuts, values, targets, layout = prepared(recipe)
    index = make_batch().index
    metrics, norms = [], []
    for number, cut in enumerate(cuts):
        num_tokens = int(index.trained_lens[list(cut.plan.rows)].sum())
        old, returns = values[number], targets.returns[number]
        loss = make_value_loss(old, returns, num_tokens=num_tokens, clip=CLIP, cp_group=layout.pgs.cp)
        parts = critic.stepper.forward_backward(cut.micro_batches, loss, cut.num_tokens)
        groups = {"dp_cp_group": layout.pgs.dp_cp, "dp_group": layout.pgs.dp}
        metrics.append(reduce_metrics(merge(parts), device="cpu", **groups) if layout.is_last_stage else {})
        norms.append(apply_gradients(critic.optimizer, critic.scheduler, skip_non_finite=False, what="critic")[0])
    flat = gather_tokens(cuts, values, index, layout)
    advantages = gather_tokens(cuts, targets.advantages, index, layout)
    return Outcome(flat, advantages, metrics, norms, {}), local_tensors(critic.stepper.model.chunks, layout)


def outcomes(size: int, recipe: Recipe) -> Outcome:
    results = run_ranks(size, one_step, recipe, timeout_s=300)
    weights = global_tensors([tensors for _, tensors in results])
    for result, _ in results:
        assert result.grad_norms == results[0][0].grad_norms
        assert torch.equal(result.values, results[0][0].values)
    last = next(result for result, _ in reversed(results) if result.metrics[0])
    return replace(last, weights=weights)


@pytest.fixture(scope="module")
def expected(checkpoint) -> Outcome:
    """One rank, plain optimizer, everything in one micro-batch."""
    return outcomes(1, recipe_for(checkpoint, max_tokens=1024, distributed=False))


def assert_same(found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.advantages, expected.advantages, rtol=0, atol=5e-5)
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_critic_is_the_same_on_every_layout(name, expected, checkpoint):
    size, layout = LAYOUTS[name]
    assert_same(outcomes(size, recipe_for(checkpoint, **layout)), expected)


@pytest.mark.parametrize("max_tokens", [72, 400])
def test_the_critic_is_the_same_however_the_batch_is_cut(max_tokens, expected, checkpoint):
    assert_same(outcomes(1, recipe_for(checkpoint, max_tokens=max_tokens)), expected)


def test_the_batch_is_hard_enough(expected):
    """Values differ, some tokens are clipped at the second update, and the head has moved."""
    assert expected.values.std() > 0.02
    assert expected.metrics[0]["clip_fraction"] == 0 < expected.metrics[1]["clip_fraction"] < 0.9
    moved = expected.weights["output_layer.weight"] - 0.05 * torch.linspace(-1, 1, 64)[None]
    assert moved.abs().max() > 1e-3


def _targets_of_rows(recipe: Recipe):
    """(rows of a batch, advantages of their trained tokens) on this rank, and the returns."""
    _, cuts, values, targets, layout = prepared(recipe)
    index = make_batch().index
    flat = [gather_tokens(cuts, of, index, layout) for of in (values, targets.advantages, targets.returns)]
    micro_batches = [micro_batch for cut in cuts for micro_batch in cut.micro_batches]
    for dtype, per_micro_batch in ((torch.float32, values), (torch.float64, targets.advantages)):
        tensors = [tensor for mini_batch in per_micro_batch for tensor in mini_batch]
        assert all(tensor.dtype == dtype for tensor in tensors)
        assert all(t.shape == m.loss_mask.shape for t, m in zip(tensors, micro_batches, strict=bool(tensors)))
    return flat


def test_targets_are_gae_of_every_response(checkpoint):
    """Cut over two context-parallel ranks and put together again, they are what one response at a time gives."""
    values, advantages, returns = run_ranks(2, _targets_of_rows, recipe_for(checkpoint, cp=2))[1]
    batch = make_batch()
    rows = batch.rows(range(batch.index.n))
    mask, offsets = rows.loss_mask, rows.offsets
    plain = gae(values, mask, offsets, batch.index.rewards, gamma=0.99, lam=0.9)
    kept = plain.advantages[mask]
    white = (plain.advantages - kept.mean()) / kept.std(correction=0)
    torch.testing.assert_close(advantages[mask], white[mask].float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(returns[mask], plain.returns[mask].float(), rtol=0, atol=1e-6)
    assert not advantages[~mask].any() and not values[~mask].any()


def _there_and_back(recipe: Recipe) -> bool:
    layout = init_layout(recipe.policy.layout)
    batch, hf_config = make_batch(), read_hf_config(recipe.policy.hf, "policy.hf")
    cuts = cut_batch(batch, make_plan(batch.index, recipe.batch, layout, hf_config), layout, torch.device("cpu"))
    flat = torch.randn(int(batch.index.lens.sum()), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat[7::11] = math.nan
    spread = spread_tokens(flat, cuts, batch.index)
    trains = batch.rows(range(batch.index.n)).loss_mask
    again = gather_tokens(cuts, spread, batch.index, layout)
    return torch.equal(again.nan_to_num(9), torch.where(trains, flat.float(), 0).nan_to_num(9))


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"pp": 2}], ids=str)
def test_numbers_of_tokens_return_from_their_micro_batches_bit_for_bit(layout, checkpoint):
    assert run_ranks(2, _there_and_back, recipe_for(checkpoint, **layout)) == [True, True]


def ppo_file(directory: Path, checkpoint: Path, records: Path, run_dir: Path) -> Path:
    """The critic moves by several clip ranges an update: values scored again would be other values."""
    path = recipe_file(directory, checkpoint, records, run_dir)
    objective = "objective: {name: ppo, clip_low: 2e-3, clip_high: 3e-3}\ncritic: {lr: 1e-2, clip: 0.02}\n"
    text = path.read_text()
    assert "objective: {name: gspo, clip_low: 2e-3, clip_high: 3e-3}\n" in text
    path.write_text(text.replace("objective: {name: gspo, clip_low: 2e-3, clip_high: 3e-3}\n", objective))
    return path


def run_and_keep(path: Path, *, resume: bool, look: int | None) -> list[torch.Tensor]:
    """Run on this rank; returns the critic's parameters as they are in the end."""
    built: list[Critic] = []

    def build(*args, **kwargs) -> Critic | None:
        critic = build_critic(*args, **kwargs)
        assert critic is not None
        built.append(critic)
        return critic

    worker.build_critic = build  # this process is a rank's own
    run_once(path, resume=resume, look=look)
    return [p.detach().clone() for chunk in built[0].stepper.model.chunks for p in chunk.parameters()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, checkpoint, records):
    directory = tmp_path_factory.mktemp("whole")
    path = ppo_file(directory, checkpoint, records, directory / "run")
    critics = run_ranks(2, lambda: run_and_keep(path, resume=False, look=None))
    return *outcome(directory / "run"), critics


# Three mini-batches give two looks a step: 1 stops inside the first step, 4 inside the second, after two updates.
@pytest.mark.parametrize("looks", [[1], [4], [1, 1, 2]], ids=str)
def test_a_stopped_run_ends_with_the_same_policy_and_critic(looks, tmp_path, checkpoint, records, uninterrupted):
    run_dir = tmp_path / "run"
    path = ppo_file(tmp_path, checkpoint, records, run_dir)
    for number, look in enumerate(looks):
        run_ranks(2, lambda look=look, number=number: run_once(path, resume=number > 0, look=look))
        newest = whole_checkpoints(run_dir)[-1]
        kept = ["critic", "policy", "run_state.json", "scores.safetensors"]
        assert sorted(found.name for found in newest.iterdir()) == kept, "the run was to stop inside a step"
    critics = run_ranks(2, lambda: run_and_keep(path, resume=True, look=None))

    weights, metrics = outcome(run_dir)
    expected_weights, expected_metrics, expected_critics = uninterrupted
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
    for found, expected in zip(critics, expected_critics, strict=True):
        assert all(map(torch.equal, found, expected))
    assert metrics[-1] == expected_metrics[-1] and "critic/explained_variance" in metrics[-1]


def test_half_a_step_without_its_values_is_refused(tmp_path, checkpoint, records):
    """The critic has moved since: its values now would be of another critic than the advantages so far."""
    path = ppo_file(tmp_path, checkpoint, records, tmp_path / "run")
    run_ranks(2, lambda: run_once(path, resume=False, look=1))
    (whole_checkpoints(tmp_path / "run")[-1] / "scores.safetensors").unlink()
    with pytest.raises(AssertionError, match=r"with scores \[\], but this run needs \['old_logp', 'values'\]"):
        run_ranks(2, lambda: run_once(path, resume=True, look=None))


def test_the_run_above_clips_and_learns(uninterrupted):
    _, metrics, _ = uninterrupted
    assert all(0 < record["critic/clip_fraction"] < 1 for record in metrics)
    assert metrics[-1]["critic/loss"] < metrics[0]["critic/loss"]
    assert all(record["critic/updates"] == 3 for record in metrics)


def _build(recipe: Recipe) -> None:
    build_critic(recipe, init_layout(recipe.policy.layout), load=True)


def test_a_critic_with_another_vocabulary_is_refused(tmp_path, checkpoint):
    other = tiny_checkpoint(tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"vocab_size": 96', '"vocab_size": 97'))
    recipe = replace(recipe_for(checkpoint), critic=CriticConfig(hf=str(other)))
    with pytest.raises(AssertionError, match=r"critic.hf: its vocab_size is 97, that of policy.hf 96"):
        run_ranks(1, _build, recipe)
    with pytest.raises(AssertionError, match=r"critic.hf: .*nowhere/config.json does not exist"):
        run_ranks(1, _build, replace(recipe, critic=CriticConfig(hf=str(tmp_path / "nowhere"))))


def test_the_critic_has_the_policys_optimizer_but_for_its_rate(checkpoint):
    recipe = recipe_for(checkpoint)
    assert critic_policy(recipe).optimizer == replace(recipe.policy.optimizer, lr=1e-2)
    own = critic_policy(replace(recipe, critic=CriticConfig(hf="elsewhere")))
    assert own == replace(recipe.policy, hf="elsewhere")


def test_a_rate_below_the_end_of_the_decay_is_refused(checkpoint):
    recipe = recipe_for(checkpoint)
    section = replace(recipe.policy.optimizer, schedule=Schedule.linear, min_lr=1e-4)
    recipe = replace(recipe, policy=replace(recipe.policy, optimizer=section), critic=CriticConfig(lr=1e-5))
    with pytest.raises(RecipeError, match=r"critic.lr = 1e-05.*: below policy.optimizer.min_lr = 0.0001"):
        validate(recipe)
