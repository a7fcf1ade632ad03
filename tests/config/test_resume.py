from pathlib import Path

import pytest

from megatron_gspo.config import RecipeError, check_resume, load_recipe

RECIPE = """
run: {dir: runs/x, steps: 5}
policy: {hf: nowhere, optimizer: {lr: 1e-4}}
objective: {name: gspo}
advantage: {}
batch: {prompts: 4, samples: 4}
data: {source: sort_digits, args: {length: 8}}
rollout: {max_new_tokens: 12}
reward: {name: sort_digits}
"""


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_the_same_recipe_resumes(path):
    check_resume(load_recipe(path), load_recipe(path))


def test_a_longer_run_on_another_server_resumes(path):
    changes = [
        "run.steps=9",
        "run.save_every=2",
        "batch.max_tokens=16384",
        "rollout.engine=external",
        "rollout.urls=[http://a:1]",
    ]
    check_resume(load_recipe(path), load_recipe(path, changes))


@pytest.mark.parametrize(
    ("change", "before"),
    [
        ("policy.optimizer.lr=2e-4", "0.0001"),
        ("policy.layout.ep=2", "1"),
        ("objective.clip_high=0.2", "0.0004"),
        ("data.args.length=9", "8"),
        ("rollout.temperature=0.5", "1.0"),
        ("run.seed=1", "0"),
    ],
)
def test_what_would_compute_something_else_is_refused(path, change, before):
    key = change.split("=")[0]
    with pytest.raises(RecipeError, match=rf"{key} = .*the run was started with {before}"):
        check_resume(load_recipe(path), load_recipe(path, [change]))


def test_a_length_that_the_learning_rate_depends_on_is_refused(path):
    linear = ["policy.optimizer.schedule=linear"]
    with pytest.raises(RecipeError, match=r"run\.steps = 9: the run was started with 5, to which the learning rate"):
        check_resume(load_recipe(path, linear), load_recipe(path, [*linear, "run.steps=9"]))
    fixed = [*linear, "policy.optimizer.decay_steps=5"]
    check_resume(load_recipe(path, fixed), load_recipe(path, [*fixed, "run.steps=9"]))


def test_a_section_that_appears_or_goes_is_refused(path):
    with pytest.raises(RecipeError, match=r"policy\.ddp.*started with"):
        check_resume(load_recipe(path), load_recipe(path, ["policy.ddp.overlap_grad_reduce=true"]))
