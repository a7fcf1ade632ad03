"""What is printed from a recipe: the effective configuration, the formula, the documentation of keys."""

from __future__ import annotations

import pytest

from megatron_gspo.config import (
    OBJECTIVES,
    PolicyObjective,
    RecipeError,
    effective_yaml,
    load_recipe,
    objective_formula,
)
from megatron_gspo.config.document import document_keys
from megatron_gspo.config.formula import FORMULAS
from megatron_gspo.config.reflect import walk
from tests.config.recipes import GSPO, SFT, edit, write


@pytest.mark.parametrize("text", [GSPO, SFT])
def test_effective_configuration_loads_to_an_equal_recipe(tmp_path, text):
    recipe = load_recipe(write(tmp_path, text))
    assert load_recipe(write(tmp_path, effective_yaml(recipe), "effective.yaml")) == recipe


def test_effective_configuration_keeps_awkward_values(tmp_path):
    args = r"reward.args={text: '4e-4', switch: 'off', small: 1e-9, nested: [1, {a: null}], raw: '\${x}', lines: "
    overrides = [args + '"a\\nb"}', "run.dir='007'", "rollout.engine=external", "rollout.urls=['http://a:1']"]
    recipe = load_recipe(write(tmp_path, GSPO), overrides)
    assert recipe.reward.args["raw"] == "${x}"
    assert load_recipe(write(tmp_path, effective_yaml(recipe), "effective.yaml")) == recipe


def test_effective_configuration_spells_out_defaults_and_interpolations(tmp_path):
    text = effective_yaml(load_recipe(write(tmp_path, edit(GSPO, ("dir: runs/x", "dir: runs/${run.steps}")))))
    assert "  dir: runs/10\n" in text
    assert "  clip_high: 0.0004\n" in text
    assert "sources" not in text


def test_every_objective_has_a_formula():
    policy = {name for name, config in OBJECTIVES.items() if issubclass(config, PolicyObjective)}
    assert FORMULAS.keys() == policy


@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_has_the_objectives_numbers(tmp_path, name):
    """Every number of the objective's own section stands in its formula: nothing that is set goes unseen."""
    recipe = load_recipe(write(tmp_path, GSPO), [f"objective={{name: {name}}}"])
    text = objective_formula(recipe)
    for key, value in vars(recipe.objective).items():
        if isinstance(value, float):
            shown = {f"{value:g}", f"{1 + value:g}", f"{1 - value:g}", f"{-value:g}"}
            assert any(number in text for number in shown), (key, value, text)
    assert load_recipe(write(tmp_path, effective_yaml(recipe), "effective.yaml")) == recipe


def test_the_formula_names_aggregation_correction_reference_and_critic(tmp_path):
    overrides = [
        "objective={name: ppo, kl: {coef: 0.05, estimator: k2, reference: runs/ref}, aggregation: constant}",
        "correction={truncate: {level: sequence, high: 3}, opsm: {delta: 0.01}}",
        "critic.clip=0.3",
    ]
    text = objective_formula(load_recipe(write(tmp_path, GSPO), overrides))
    assert "J(θ)  = 1/N Σᵢ 1/16 Σₜ [ ωᵢₜ min( rᵢₜ Âᵢₜ" in text and "- 0.05 KLᵢₜ ]" in text
    assert "ωᵢₜ   = sg[ min(w, 3) 1[ Â >= 0 or mean of log(π_rollout / π_θ) <= 0.01 ] ]" in text
    assert "KLᵢₜ  = d² / 2" in text and "π_ref = runs/ref, fixed" in text
    assert "max( (V - R)², (clip(V, V_old ± 0.3) - R)² )" in text


def test_gspo_formula_has_the_recipes_numbers(tmp_path):
    recipe = load_recipe(write(tmp_path, GSPO), ["objective.clip_high=0.05", "rollout.temperature=0.7"])
    text = objective_formula(recipe)
    assert "min( sᵢ Âᵢ , clip(sᵢ, 1 - 0.0003, 1 + 0.05) Âᵢ )" in text
    assert "Âᵢ   = (rᵢ - mean(r₁ … r_G)) / (std(r₁ … r_G) + 1e-06)" in text
    assert "N     = 256 sequences per optimizer step: 32 prompts x 16 samples, 2 mini-batches" in text
    assert "r₁ … r_G of the G = 16 responses" in text
    assert "π     = softmax(logits / 0.7)\n" in text
    assert "π_old = the trainer's weights before the step; scored once, for all 2 mini-batches" in text


def test_gspo_formula_follows_the_choices(tmp_path):
    overrides = ["batch.mini_batches=1", "advantage.normalize_std=false", "rollout.top_p=0.9", "rollout.top_k=50"]
    text = objective_formula(load_recipe(write(tmp_path, GSPO), overrides))
    assert "Âᵢ   = rᵢ - mean(r₁ … r_G);" in text
    assert "π_old = sg(π_θ)" in text
    assert "sampled with top_p 0.9 and top_k 50" in text


def test_sft_formula_has_the_recipes_numbers(tmp_path):
    text = objective_formula(load_recipe(write(tmp_path, SFT), ["batch.mini_batches=4"]))
    assert "L(θ) = - 1/T Σᵢ Σₜ log π_θ" in text
    assert "N = 8 sequences per optimizer step: 32 prompts, 4 mini-batches" in text


def test_every_key_is_documented():
    undocumented = [path for path, key, _ in walk() if not key.doc]
    assert undocumented == []
    text = document_keys()
    assert all(f"{path}: " in text for path, _, _ in walk())


def test_documentation_of_one_section_gives_type_default_bounds_and_meaning():
    assert document_keys("policy.optimizer").splitlines()[:8] == [
        "policy.optimizer: section",
        "    AdamW on Megatron's (distributed) optimizer and its learning-rate schedule, in optimizer steps.",
        "policy.optimizer.lr: float, > 0 required",
        "    peak learning rate",
        "policy.optimizer.min_lr: float, >= 0 = 0.0",
        "    learning rate at the end of the decay",
        "policy.optimizer.schedule: constant | linear | cosine = constant",
        "    decay after the warm-up",
    ]
    assert f"objective.name: {' | '.join(OBJECTIVES)} required" in document_keys("objective")
    documented = document_keys("objective")
    assert "objective.clip_low: float, >= 1e-06 and < 1 = 0.0003 (objective gspo, gspo_token)" in documented
    assert documented.count("objective.kl: ") == documented.count("objective.on_policy_check: ") == 1
    assert "objective.on_policy_check: stop | warn = stop (not sft)" in documented


def test_documentation_of_an_unknown_section_names_the_nearest():
    with pytest.raises(RecipeError, match=r"^nosuch: no such key or section; sections: run, policy, policy.layout, "):
        document_keys("nosuch")
    with pytest.raises(RecipeError, match=r"^rolout: no such key or section; did you mean rollout\?$"):
        document_keys("rolout")
    with pytest.raises(RecipeError, match=r"^objective.dapo: .*; dapo is a value of objective.name; its keys are "):
        document_keys("objective.dapo")
