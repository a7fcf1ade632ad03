"""What a recipe names and cannot be used is refused before anything starts, with its key and the place that set it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.config import Recipe, RecipeError, load_recipe
from megatron_gspo.loop.check import check_inputs, check_shown
from megatron_gspo.loop.checkpoints import RunState, checkpoint_dir

RECIPE = """
run: {dir: DIR/run, steps: 5}
policy: {hf: DIR/hf, optimizer: {lr: 1e-4}}
objective: {name: gspo}
advantage: {}
batch: {prompts: 4, samples: 4, max_tokens: 512}
data: {source: sort_digits, max_prompt_tokens: 32}
rollout: {max_new_tokens: 12}
reward: {name: sort_digits}
"""
SFT = """
run: {dir: DIR/run, steps: 5}
policy: {hf: DIR/hf, optimizer: {lr: 1e-4}}
objective: {name: sft}
batch: {prompts: 4, max_tokens: 512}
data: {source: jsonl, path: DIR/data.jsonl}
"""


def checkpoint(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    hf = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps(hf))
    (path / "model.safetensors").touch()
    return path


def write(directory: Path, text: str) -> Path:
    path = directory / "mine.yaml"
    path.write_text(text.replace("DIR", str(directory)))
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    checkpoint(tmp_path / "hf")
    return write(tmp_path, RECIPE)


@pytest.fixture
def sft(tmp_path) -> Path:
    checkpoint(tmp_path / "hf")
    (tmp_path / "data.jsonl").write_text('\n{"prompt": "2 + 3 =", "response": "5"}\n')
    return write(tmp_path, SFT)


def refusal(recipe: Recipe, resume: bool = False) -> str:
    with pytest.raises(RecipeError) as info:
        check_inputs(recipe, resume)
    assert not (Path(recipe.run.dir) / "recipe.yaml").exists() or resume
    return str(info.value)


def test_good_recipes_pass(path, sft):
    check_inputs(load_recipe(path))
    check_inputs(load_recipe(sft))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reward.name=sort_digit", "no such reward; try sort_digits"),
        ("reward.name='no_module:f'", "no module 'no_module'"),
        ("data.source=sort_digts", "no such source"),
        ("data.args={lenght: 8}", "lenght"),
        ("data.args={length: 0}", "data.args.length = 0"),
        ("policy.hf=Qwen/Qwen3-0.6B", "policy.hf = 'Qwen/Qwen3-0.6B': no such directory"),
        ("objective.kl={reference: no/such}", "objective.kl.reference = 'no/such': no such directory"),
    ],
)
def test_an_unknown_name_is_refused(path, change, message):
    assert message in refusal(load_recipe(path, [change]))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_checkpoint_is_refused(path, missing):
    (path.parent / "hf" / missing).unlink()
    assert "policy.hf" in refusal(load_recipe(path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "2 + 3", "response": "5"},
            "no field 'prompt' (data.prompt_key); the fields are question, response",
        ),
        ({"prompt": "", "response": "5"}, "expected a non-empty string"),
        ({"prompt": "2 + 3", "answer": "5"}, "'response' (data.response_key); its fields: answer"),
        ({"prompt": "2 + 3", "response": 5}, "has none as text in the field 'response'"),
    ],
)
def test_data_whose_first_row_does_not_do_is_refused(sft, row, message):
    (sft.parent / "data.jsonl").write_text(json.dumps(row) + "\n")
    text = refusal(load_recipe(sft))
    assert message in text and text.startswith(f"{sft}:6: data.path")


def test_missing_and_broken_data_is_refused(sft):
    (sft.parent / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt"\n')
    assert "data.jsonl:2: not valid JSON" in refusal(load_recipe(sft))
    (sft.parent / "data.jsonl").unlink()
    assert "no such file" in refusal(load_recipe(sft))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.megatron.recompute_granularty=full", "command line: policy.megatron.recompute_granularty: "),
        ("policy.megatron.recompute_granularty=full", "did you mean 'recompute_granularity'"),
        ("policy.ddp.overlap_grad_reducee=true", "overlap_grad_reduce"),
        ("policy.optimizer.megatron.adam_eps=1", "policy.optimizer.eps"),
        ("rollout.server.args.model_path=x", "this flag follows from"),
    ],
)
def test_an_unknown_field_or_flag_is_refused(path, change, message):
    assert message in refusal(load_recipe(path, [change]))


def test_an_unknown_field_is_blamed_on_its_line(path):
    path.write_text(path.read_text().replace("policy: {", "policy:\n  {megatron: {foo: 1}, "))
    assert refusal(load_recipe(path)).startswith(f"{path}:4: policy.megatron.foo: ")


@pytest.mark.parametrize(
    ("code", "message"), [("import nothing_of_this_name", "ModuleNotFoundError"), ("def f(:", "SyntaxError")]
)
def test_a_reward_whose_module_fails_is_refused(path, monkeypatch, code, message):
    monkeypatch.syspath_prepend(path.parent)
    (path.parent / "failing_reward.py").write_text(code)
    text = refusal(load_recipe(path, ["reward.name='failing_reward:f'"]))
    assert "its module fails as it is imported" in text and message in text
    sys.modules.pop("failing_reward", None)


def test_a_mixture_that_the_server_does_not_build_is_refused(path):
    config = Path(load_recipe(path).policy.hf) / "config.json"
    hf = json.loads(config.read_text())
    config.write_text(json.dumps(hf | {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]}))
    text = refusal(load_recipe(path))
    assert "policy.hf" in text and "mixes dense and sparse layers" in text


def test_a_quantised_policy_is_refused_where_a_server_would_start_from_it(path):
    config = Path(load_recipe(path).policy.hf) / "config.json"
    hf = json.loads(config.read_text())
    config.write_text(json.dumps(hf | {"quantization_config": {"quant_method": "mxfp4"}}))
    text = refusal(load_recipe(path))
    assert "policy.hf" in text and "decode the checkpoint with tools/hf_to_megatron.py" in text


# ---- run.dir and what lies in it


@pytest.mark.parametrize("place", ["run", "run/hf", "run/checkpoints/mine", "run/../run/hf", "link/hf"])
@pytest.mark.parametrize("key", ["policy.hf", "critic.hf", "objective.kl.reference", "rollout.replay"])
def test_an_input_where_the_run_writes_is_refused(path, key, place):
    (path.parent / "link").symlink_to(path.parent / "run")
    value = f"{path.parent}/{place}"
    changes = {
        "critic.hf": [f"critic.hf={value}", "advantage.estimator=gae", "objective.name=ppo"],
        "objective.kl.reference": [f"objective.kl={{reference: '{value}'}}"],
    }.get(key, [f"{key}={value}"])
    assert f"{key} = '{value}': inside run.dir" in refusal(load_recipe(path, changes))


@pytest.mark.parametrize("value", ["''", "' '", '"a\\0b"'])
def test_a_run_dir_that_is_no_path_is_refused(path, value):
    assert "expected the path of a folder" in refusal(load_recipe(path, [f"run.dir={value}"]))


def test_a_run_dir_that_is_a_file_is_refused(path):
    (path.parent / "run").touch()
    assert "there is a file of that name" in refusal(load_recipe(path))


# ---- replay


def write_records(folder: Path, steps: range) -> Path:
    for step in steps:
        (folder / f"step_{step:06d}").mkdir(parents=True)
        (folder / f"step_{step:06d}" / "batch.safetensors").touch()
    return folder


def test_every_step_needs_its_record_before_the_first(path):
    records = write_records(path.parent / "records", range(3))
    recipe = load_recipe(path, [f"rollout.replay={records}"])
    text = refusal(recipe)
    assert "holds no record step_000003, nor 1 others; run.steps = 5 needs step_000000 to step_000004" in text
    write_records(records, range(3, 5))
    check_inputs(recipe)


def test_a_resumed_run_needs_the_records_of_the_steps_that_are_left(path):
    run_dir = path.parent / "run"
    write_records(run_dir / "rollouts", range(3, 5))  # its own: the run writes none while it replays
    recipe = load_recipe(path, [f"rollout.replay={run_dir}/rollouts"])
    (run_dir / "recipe.yaml").touch()
    for step in (2, 3):
        newest = checkpoint_dir(run_dir, RunState(step=step, weight_version=step))
        newest.mkdir(parents=True)
        (newest / "run_state.json").write_text(json.dumps({"step": step, "weight_version": step}))
        if step == 2:
            assert "holds no record step_000002;" in refusal(recipe, resume=True)
    check_inputs(recipe, resume=True)


# ---- show


def test_show_refuses_what_train_refuses(path):
    for change in ("reward.name=sort_digit", "data.args={lenght: 8}", "run.dir=''", "run.workers=3 policy.layout.ep=2"):
        with pytest.raises(RecipeError):
            check_shown(load_recipe(path, change.split() if "workers" in change else [change]))


def test_show_only_mentions_what_may_be_otherwise_where_the_run_is_to_be(path):
    (path.parent / "hf" / "config.json").unlink()
    unseen = check_shown(load_recipe(path, ["policy.layout.cp=8"]))
    assert [problem.key for problem in unseen] == ["policy.hf", "policy.layout"]
    changes = [f"policy.hf={checkpoint(path.parent / 'other')}", "policy.megatron.foo=1"]
    assert [problem.key for problem in check_shown(load_recipe(path, changes))] == ["policy.megatron"]


@pytest.mark.parametrize("check", ["check_inputs", "check_shown"])
def test_a_plain_recipe_is_checked_without_torch(sft, check):
    code = (
        f"import sys; from megatron_gspo.config import load_recipe; from megatron_gspo.loop.check import {check}; "
        f"{check}(load_recipe({str(sft)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
