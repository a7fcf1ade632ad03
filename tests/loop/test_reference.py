"""The reference policy of the KL penalty: the policy itself until the first update, and fixed for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from megatron_gspo.config import (
    BatchConfig,
    Dtype,
    GrpoConfig,
    GspoConfig,
    KlConfig,
    LayoutConfig,
    OptimizerSection,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    RunConfig,
    SftConfig,
)
from megatron_gspo.loop.cut import Cut, cut_batch, gather_tokens, make_plan
from megatron_gspo.loop.reference import build_reference
from megatron_gspo.loop.state import whole_checkpoints
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import build_model, ddp_config, read_hf_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper, apply_gradients
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.load import load_hf
from tests.loop.batches import PROMPTS, SAMPLES, make_batch, write_records
from tests.loop.test_resume import outcome, recipe_file, run_once
from tests.loop.tiny import tiny_checkpoint
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    return write_records(tmp_path_factory.mktemp("records"), 3)


def recipe_for(checkpoint: Path, *, dtype: Dtype = Dtype.fp32, kl: KlConfig | None = None, **layout: int) -> Recipe:
    return Recipe(
        run=RunConfig(dir="unused", steps=1),
        policy=PolicyConfig(
            hf=str(checkpoint),
            dtype=dtype,
            layout=LayoutConfig(**layout),
            optimizer=OptimizerSection(lr=1e-2, eps=1e-2),
        ),
        objective=GrpoConfig(kl=kl or KlConfig()),
        rollout=RolloutConfig(max_new_tokens=40, temperature=0.8),
        batch=BatchConfig(prompts=PROMPTS, samples=SAMPLES, max_tokens=160),
    )


def make_cuts(recipe: Recipe, layout: Layout) -> list[Cut]:
    batch, hf_config = make_batch(), read_hf_config(recipe.policy.hf, "policy.hf")
    return cut_batch(batch, make_plan(batch.index, recipe.batch, layout, hf_config), layout, torch.device("cpu"))


def logp_of(stepper: Stepper, cuts: list[Cut], layout: Layout) -> torch.Tensor:
    scored = [[logp for logp, _ in stepper.score(cut.micro_batches)] for cut in cuts]
    return gather_tokens(cuts, scored, make_batch().index, layout)


def before_and_after_an_update(recipe: Recipe) -> list[torch.Tensor]:
    """Log-probabilities of the policy, of the reference, and of both after an update of the policy."""
    layout = init_layout(recipe.policy.layout)
    hf_config = read_hf_config(recipe.policy.hf, "policy.hf")
    model = build_model(hf_config, recipe.policy, layout)
    load_hf(recipe.policy.hf, bind(model.chunks, hf_config, layout.pgs))
    chunks = wrap(model, ddp_config(recipe.policy), layout)
    optimizer, scheduler = build_optimizer(recipe, chunks, layout)
    policy, reference = Stepper(model, chunks, layout, temperature=0.8), build_reference(recipe, layout)
    assert reference is not None
    for parameter in (p for chunk in reference.chunks for p in chunk.parameters()):
        assert not parameter.requires_grad and not hasattr(parameter, "main_grad")
    (cut,) = cuts = make_cuts(recipe, layout)
    found = [logp_of(stepper, cuts, layout) for stepper in (policy, reference)]
    policy.forward_backward(cut.micro_batches, lambda micro, number, logp, entropy: (-logp.mean(), {}), cut.num_tokens)
    apply_gradients(optimizer, scheduler, skip_non_finite=False, what="policy")
    return found + [logp_of(stepper, cuts, layout) for stepper in (policy, reference)]


LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2_etp2": (2, {"tp": 2, "etp": 2}),
    "cp2_ep2_pp2": (4, {"cp": 2, "ep": 2, "pp": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_the_policy_before_any_update_and_stays(name, checkpoint):
    """Bit for bit, so that the penalty starts at exactly 0."""
    size, layout = LAYOUTS[name]
    for policy, reference, moved, still in run_ranks(
        size, before_and_after_an_update, recipe_for(checkpoint, **layout)
    ):
        assert torch.equal(policy, reference) and policy.abs().max() > 1
        assert torch.equal(reference, still)
        assert (moved - policy).abs().max() > 1e-2


def test_it_is_the_policy_in_bf16_too(checkpoint):
    policy, reference, *_ = run_ranks(1, before_and_after_an_update, recipe_for(checkpoint, dtype=Dtype.bf16))[0]
    assert torch.equal(policy, reference)


def test_another_checkpoint_is_that_checkpoints_policy(checkpoint, other):
    recipe = recipe_for(checkpoint, kl=KlConfig(reference=str(other)))
    policy, reference, *_ = run_ranks(1, before_and_after_an_update, recipe)[0]
    theirs, *_ = run_ranks(1, before_and_after_an_update, recipe_for(other))[0]
    assert torch.equal(reference, theirs) and (policy - theirs).abs().max() > 0.1


def _build(recipe: Recipe) -> bool:
    return build_reference(recipe, init_layout(recipe.policy.layout)) is not None


def test_it_is_built_for_a_penalty_alone(checkpoint):
    recipe = recipe_for(checkpoint)
    objectives = {GrpoConfig(): True, GrpoConfig(kl=None): False, GspoConfig(kl=KlConfig()): True, SftConfig(): False}
    for objective, built in objectives.items():
        assert run_ranks(1, _build, replace(recipe, objective=objective)) == [built], objective


def test_what_cannot_be_a_reference_is_refused(tmp_path, checkpoint):
    larger = tiny_checkpoint(tmp_path / "larger")
    config = (larger / "config.json").read_text()
    (larger / "config.json").write_text(config.replace('"vocab_size": 96', '"vocab_size": 128'))
    with pytest.raises(AssertionError, match=r"objective.kl.reference: its vocab_size is 128, that of policy.hf 96"):
        run_ranks(1, _build, recipe_for(checkpoint, kl=KlConfig(reference=str(larger))))
    with pytest.raises(AssertionError, match=r"objective.kl.reference: .*nowhere/config.json does not exist"):
        run_ranks(1, _build, recipe_for(checkpoint, kl=KlConfig(reference=str(tmp_path / "nowhere"))))


def grpo_file(directory: Path, checkpoint: Path, records: Path, run_dir: Path, **changes: object) -> Path:
    """GRPO with the k3 penalty, weighing more than usual so that it is felt."""
    path = recipe_file(directory, checkpoint, records, run_dir)
    recipe = yaml.safe_load(path.read_text())
    recipe["objective"] = {"name": "grpo", "clip_low": 0.02, "clip_high": 0.03, "kl": {"coef": 1.0}}
    recipe["policy"]["optimizer"] = {"lr": 1e-3}
    recipe["batch"] |= changes
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_the_penalty_of_a_run_starts_at_zero_and_grows(tmp_path, checkpoint, records):
    path = grpo_file(tmp_path, checkpoint, records, tmp_path / "run", mini_batches=1)
    run_ranks(2, lambda: run_once(path, resume=False, look=None))
    _, metrics = outcome(tmp_path / "run")
    penalties = [record["objective/kl_reference"] for record in metrics]
    assert penalties[0] == 0 and 0 < penalties[1] < penalties[2]


def test_a_stopped_run_ends_with_the_same_numbers(tmp_path, checkpoint, records):
    """Resumed inside a step, the policy trains before the reference scores: Megatron keeps one scale of router losses
    for all models, which then had a shape that the reference's did not fit."""
    whole = grpo_file(tmp_path, checkpoint, records, tmp_path / "whole")
    stopped = grpo_file(tmp_path, checkpoint, records, tmp_path / "stopped")
    run_ranks(2, lambda: run_once(whole, resume=False, look=None))
    run_ranks(2, lambda: run_once(stopped, resume=False, look=4))
    newest = whole_checkpoints(tmp_path / "stopped")[-1]
    kept = ["policy", "run_state.json", "scores.safetensors"]
    assert sorted(found.name for found in newest.iterdir()) == kept, "the run was to stop inside a step"
    run_ranks(2, lambda: run_once(stopped, resume=True, look=None))
    expected_weights, expected_metrics = outcome(tmp_path / "whole")
    weights, metrics = outcome(tmp_path / "stopped")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
    assert metrics[-1] == expected_metrics[-1]
