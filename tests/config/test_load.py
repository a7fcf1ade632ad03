"""Loading: types, bases, overrides, and what is refused before anything is checked for sense."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from megatron_gspo.config import OBJECTIVES, GspoConfig, RecipeError, RolloutConfig, Schedule, SftConfig, load_recipe
from tests.config.recipes import GSPO, SFT, edit, refusal, write


def test_values_are_typed_and_defaults_filled(tmp_path):
    recipe = load_recipe(write(tmp_path, GSPO))
    assert recipe.policy.optimizer.lr == 3e-4  # YAML 1.1 alone reads 3e-4 as a string
    assert recipe.policy.optimizer.schedule is Schedule.constant
    assert recipe.objective == GspoConfig(clip_low=3e-4, clip_high=4e-4)
    assert recipe.rollout == RolloutConfig(max_new_tokens=16)
    assert recipe.observe.wandb is None


def test_objective_class_follows_its_name_and_absent_sections_stay_none(tmp_path):
    recipe = load_recipe(write(tmp_path, SFT))
    assert recipe.objective == SftConfig()
    assert (recipe.advantage, recipe.rollout, recipe.reward) == (None, None, None)


def test_recipe_is_immutable(tmp_path):
    recipe = load_recipe(write(tmp_path, GSPO))
    with pytest.raises(FrozenInstanceError):
        recipe.batch.prompts = 3


def test_overrides_are_yaml_and_the_last_one_wins(tmp_path):
    overrides = [
        "objective.clip_high=5e-4",
        "objective.clip_high=4e-2",
        "policy.megatron.moe_aux_loss_coeff=1e-3",
        "reward.args={weights: [1, 2.5], mode: strict}",
        "observe.wandb.project=sorting",
        "policy.layout.pipeline_layout=null",
    ]
    recipe = load_recipe(write(tmp_path, GSPO), overrides)
    assert recipe.objective.clip_high == 0.04
    assert recipe.policy.megatron == {"moe_aux_loss_coeff": 0.001}
    assert recipe.reward.args == {"weights": [1, 2.5], "mode": "strict"}
    assert recipe.observe.wandb.project == "sorting"


def test_interpolations_are_resolved_with_the_type_of_the_key(tmp_path):
    text = edit(
        GSPO, ("hf: no/such/model", "hf: models/${run.steps}"), ("steps: 10", "steps: 10\n  seed: ${run.steps}")
    )
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.policy.hf, recipe.run.seed) == ("models/10", 10)


def test_bases_chain_relative_to_their_file_and_the_nearest_file_wins(tmp_path):
    (tmp_path / "lib").mkdir()
    write(tmp_path / "lib", GSPO, "ground.yaml")
    write(tmp_path / "lib", "base: ground.yaml\nbatch: {prompts: 64}\nreward: {args: {a: 1}}\n", "middle.yaml")
    top = write(tmp_path, "base: lib/middle.yaml\nbatch:\n  samples: 8\nreward: {args: {b: 2}}\n")
    recipe = load_recipe(top)
    assert (recipe.batch.prompts, recipe.batch.samples, recipe.batch.mini_batches) == (64, 8, 2)
    assert recipe.reward.args == {"a": 1, "b": 2}
    assert recipe.where("batch.samples") == f"{tmp_path}/r.yaml:3"
    assert recipe.where("batch.prompts") == f"{tmp_path}/lib/middle.yaml:2"
    assert recipe.where("batch.mini_batches") == f"{tmp_path}/lib/ground.yaml:14"


def test_null_drops_a_section_of_the_base(tmp_path):
    write(tmp_path, GSPO, "gspo.yaml")
    text = (
        "base: gspo.yaml\nobjective: {name: sft}\nadvantage: null\nrollout: null\nreward: null\nbatch: {samples: 1}\n"
    )
    assert load_recipe(write(tmp_path, text)).rollout is None


def test_where_names_the_override_the_line_or_the_section_around_a_default(tmp_path):
    path = write(tmp_path, GSPO)
    recipe = load_recipe(path, ["policy.megatron.moe_aux_loss_coeff=1e-3"])
    assert recipe.where("policy.megatron.moe_aux_loss_coeff") == "command line"
    assert recipe.where("policy.optimizer.lr") == f"{path}:7"
    assert recipe.where("rollout.temperature") == f"{path}:18"
    assert recipe.where("observe.wandb") == str(path)


def test_keys_of_a_yaml_merge_are_located_at_the_anchor_and_own_keys_at_their_line(tmp_path):
    text = edit(
        GSPO,
        ("  source: sort_digits\n", "  source: sort_digits\n  args: &task {n: 8, seed: 1}\n"),
        ("reward:\n", "reward:\n  args:\n    seed: 2\n    <<: *task\n"),
    )
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.reward.args == {"n": 8, "seed": 2}
    assert recipe.where("reward.args.n") == f"{tmp_path}/r.yaml:17"
    assert recipe.where("reward.args.seed") == f"{tmp_path}/r.yaml:23"


VALID = f"valid: {', '.join(OBJECTIVES)}"
REFUSED = [
    ("prompts: 32", "promts: 32", "r.yaml:12: batch.promts = 32: no such key; did you mean batch.prompts?"),
    ("    lr: 3e-4", "    lr: 3e-4\n    lrr: 1", "r.yaml:8: policy.optimizer.lrr = 1: no such key; did you mean"),
    (
        "hf: no/such/model",
        "hf: no/such/model\n  tp: 2",
        "r.yaml:6: policy.tp = 2: no such key; did you mean policy.layout.tp or rollout.server.tp?",
    ),
    (
        "run:\n",
        "foo: 3\nrun:\n",
        "r.yaml:1: foo = 3: no such key; "
        "valid: run, policy, objective, advantage, correction, critic, batch, data, rollout, reward, observe",
    ),
    ("steps: 10", "steps: ten", "r.yaml:3: run.steps = 'ten': expected int"),
    ("steps: 10", "steps: 1e20", "r.yaml:3: run.steps = 1e+20: expected int"),
    ("steps: 10", "steps: 1.5", "r.yaml:3: run.steps = 1.5: expected int"),
    ("steps: 10", "steps: true", "r.yaml:3: run.steps = true: expected int"),
    ("steps: 10", "steps: null", "r.yaml:3: run.steps = null: expected int"),
    ("lr: 3e-4", "lr: fast", "r.yaml:7: policy.optimizer.lr = 'fast': expected float"),
    ("dir: runs/x", "dir: 1.10", "r.yaml:2: run.dir = 1.1: expected str; quote it if it is meant as text"),
    ("advantage: {}", "advantage: 3", "r.yaml:10: advantage = 3: expected a section (a mapping of keys)"),
    (
        "hf: no/such/model",
        "hf: x\n  dtype: bf61",
        "r.yaml:6: policy.dtype = 'bf61': expected bf16 | fp32; valid: bf16, fp32",
    ),
    ("hf: no/such/model", "hf: x\n  ddp: 3", "r.yaml:6: policy.ddp = 3: expected mapping of str"),
    ("name: gspo", "name: gspoo", "r.yaml:9: objective.name = 'gspoo': no such objective; did you mean gspo?"),
    (
        "hf: no/such/model",
        "hf: x\n  dtype: fp16",
        "r.yaml:6: policy.dtype = 'fp16': expected bf16 | fp32; valid: bf16, fp32",
    ),
    ("name: gspo", "name: dpo2", f"r.yaml:9: objective.name = 'dpo2': no such objective; {VALID}"),
    (
        "advantage: {}",
        "advantage: {estimator: gea}",
        "r.yaml:10: advantage.estimator = 'gea': no such advantage estimator; valid: group, leave_one_out, gae",
    ),
    (
        "advantage: {}",
        "advantage: {normalize_std: 2}",
        "r.yaml:10: advantage.normalize_std = 2: expected bool; valid: true, false",
    ),
    ("dir: runs/x", "dir: runs/x\n  export_hf: 'on'", "r.yaml:3: run.export_hf = 'on': expected bool; valid: true"),
    ("dir: runs/x", "dir: runs/x\n  export_hf: 0", "r.yaml:3: run.export_hf = 0: expected bool; valid: true"),
    ("name: gspo", "name: x", f"r.yaml:9: objective.name = 'x': no such objective; {VALID}"),
    ("name: gspo", "name: [gspo]", "r.yaml:9: objective.name = ['gspo']: no such objective; valid: gspo, "),
    (
        "name: gspo",
        "clip_low: 1e-3",
        "r.yaml:9: objective.clip_low = 0.001: objective.name is not set, and decides which keys there are",
    ),
    ("steps: 10", "steps: \x00", "r.yaml: YAML: unacceptable character #x0000"),
    ("  steps: 10\n", "", "r.yaml:1: run.steps: required, but not set; RL steps (batches)"),
    (
        "objective:\n  name: gspo\n",
        "",
        f"r.yaml: objective.name: required, but not set; valid: {', '.join(OBJECTIVES)}",
    ),
    (
        "steps: 10",
        "steps: ${run.stepz}",
        "r.yaml:3: run.steps = '${run.stepz}': Interpolation key 'run.stepz' not found; did you mean run.steps?",
    ),
    (
        "steps: 10",
        "steps: ${run.dir}",
        "r.yaml:3: run.steps = '${run.dir}': While dereferencing interpolation "
        "'${run.dir}': Value 'runs/x' of type 'str' could not be converted to Integer; run.steps takes int",
    ),
    ("steps: 10", "steps: 10\n  steps: 11", "r.yaml:4: YAML: found duplicate key steps"),
    ("advantage: {}", "advantage: {", "r.yaml:12: YAML: expected ',' or '}', but got ':'"),
    ("run:\n", "base: s.yaml\nrun:\n", "r.yaml:1: base = 's.yaml': no such file: s.yaml; did you mean r.yaml?"),
    ("run:\n", "base: 7\nrun:\n", "r.yaml:1: base = 7: expected the path of another recipe, relative to this one"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED)
def test_refused_with_line_value_reason_and_hint(tmp_path, old, new, message):
    assert refusal(write(tmp_path, edit(GSPO, (old, new)))).startswith(message)


def test_every_problem_is_reported_at_once(tmp_path):
    text = edit(GSPO, ("prompts: 32", "promts: 32"), ("steps: 10", "steps: ten"))
    assert refusal(write(tmp_path, text)).splitlines() == [
        "r.yaml:3: run.steps = 'ten': expected int",
        "r.yaml:12: batch.promts = 32: no such key; did you mean batch.prompts?",
        "r.yaml:11: batch.prompts: required, but not set; prompts per step",
    ]


def test_key_of_another_objective_is_refused(tmp_path):
    text = edit(SFT, ("name: sft", "name: sft\n  clip_low: 3e-4"))
    expected = "r.yaml:10: objective.clip_low = 0.0003: the objective 'sft' does not use this key; its keys: name"
    assert refusal(write(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.promts=3", "command line: batch.promts = 3: no such key; did you mean batch.prompts?"),
        ("bar.x=3", "command line: bar = {'x': 3}: no such key; valid: run, "),
        ("policy.layout.tp=two", "command line: policy.layout.tp = 'two': expected int"),
        ("run.steps", "command line: 'run.steps': an override is KEY=VALUE, e.g. objective.clip_high=4e-4"),
        ("=3", "command line: '=3': an override is KEY=VALUE, e.g. objective.clip_high=4e-4"),
        ("run.steps=[1", "command line: run.steps = '[1': not a YAML value: expected ',' or ']'"),
        ("run.steps=${x", "command line: run.steps = '${x': not a YAML value: "),
    ],
)
def test_override_is_refused_as_such(tmp_path, override, message):
    assert refusal(write(tmp_path, GSPO), override).startswith(message)


def test_a_bool_may_come_from_another_key_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPORT", "false")
    text = edit(GSPO, ("dir: runs/x", "dir: runs/x\n  export_hf: ${oc.env:EXPORT}"))
    recipe = load_recipe(write(tmp_path, text), ["data.shuffle=${run.export_hf}", "data.source=jsonl", "data.path=a"])
    assert (recipe.run.export_hf, recipe.data.shuffle) == (False, False)


def test_missing_file_is_named(tmp_path):
    write(tmp_path, GSPO, "demo_sort.yaml")
    assert refusal(tmp_path / "demo_srt.yaml") == "demo_srt.yaml: no such file; did you mean demo_sort.yaml?"


def test_a_recipe_is_a_mapping(tmp_path):
    assert refusal(write(tmp_path, "- run\n")) == "r.yaml: YAML: a recipe is a mapping of sections"


def test_cycle_of_bases_is_refused_where_it_closes(tmp_path):
    write(tmp_path, "run: {seed: 1}\nbase: r.yaml\n", "b.yaml")
    expected = "b.yaml:2: base = 'r.yaml': bases form a cycle: r.yaml -> b.yaml -> r.yaml"
    assert refusal(write(tmp_path, "base: b.yaml\n")) == expected


def test_error_survives_pickling_between_processes(tmp_path):
    with pytest.raises(RecipeError) as info:
        load_recipe(write(tmp_path, edit(GSPO, ("steps: 10", "steps: ten"))))
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


def test_an_empty_mapping_empties_the_one_below(tmp_path):
    (tmp_path / "low.yaml").write_text(GSPO.replace("  max_prompt", "  args: {length: 8}\n  max_prompt"))
    path = write(tmp_path, "base: low.yaml\ndata: {source: jsonl, path: sums.jsonl, args: {}}\n")
    recipe = load_recipe(path)
    assert recipe.data.args == {} and recipe.data.max_prompt_tokens == 64


def test_another_objective_leaves_the_keys_of_the_old_one_behind(tmp_path):
    low = GSPO.replace("  name: gspo", "  name: gspo\n  clip_low: 0.1")
    (tmp_path / "low.yaml").write_text(low)
    path = write(tmp_path, "base: low.yaml\nobjective: {name: gspo, clip_high: 0.3}\n")
    assert load_recipe(path).objective == GspoConfig(clip_low=0.1, clip_high=0.3)
    dropped = ["advantage=null", "rollout=null", "reward=null", "batch.samples=1"]
    assert load_recipe(tmp_path / "low.yaml", ["objective.name=sft", *dropped]).objective == SftConfig()


def test_words_after_the_recipe_count_in_any_order(tmp_path):
    path = write(tmp_path, GSPO)
    words = ["objective.tau_pos=2", "objective.name=sapo", "objective.kl.coef=0.1"]
    for order in (words, words[::-1], [words[1], words[2], words[0]]):
        recipe = load_recipe(path, order)
        assert (recipe.objective.name, recipe.objective.tau_pos, recipe.objective.kl.coef) == ("sapo", 2.0, 0.1)
    with pytest.raises(RecipeError, match=r"objective\.nonsense = 3: no such key"):
        load_recipe(path, ["objective.nonsense=3", "objective.name=grpo"])
    assert load_recipe(path, ["run.steps=3", "run.steps=4"]).run.steps == 4
