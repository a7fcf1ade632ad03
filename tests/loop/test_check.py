"""Names that only rewards, tasks, Megatron and the server know are refused before anything starts, with their key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.config import RecipeError, load_recipe
from megatron_gspo.loop.check import check_fields, check_names

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


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "hf").mkdir()
    hf = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DIR", str(tmp_path)))
    return path


def test_a_good_recipe_passes(path):
    check_names(load_recipe(path))
    check_fields(load_recipe(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reward.name=sort_digit", "no such reward; try sort_digits"),
        ("data.source=sort_digts", "no such source"),
        ("data.args={lenght: 8}", "lenght"),
    ],
)
def test_an_unknown_name_is_refused(path, change, message):
    with pytest.raises(RecipeError, match=message):
        check_names(load_recipe(path, [change]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.megatron.recompute_granularty=full", "recompute_granularity"),
        ("policy.ddp.overlap_grad_reducee=true", "overlap_grad_reduce"),
        ("policy.optimizer.megatron.adam_eps=1", "policy.optimizer.eps"),
        ("rollout.server.args.model_path=x", "this flag follows from"),
    ],
)
def test_an_unknown_field_or_flag_is_refused(path, change, message):
    with pytest.raises(RecipeError, match=message):
        check_fields(load_recipe(path, [change]))


def test_a_mixture_that_the_server_does_not_build_is_refused(path):
    config = Path(load_recipe(path).policy.hf) / "config.json"
    hf = json.loads(config.read_text())
    config.write_text(json.dumps(hf | {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]}))
    with pytest.raises(RecipeError, match=r"policy.hf.*mixes dense and sparse layers"):
        check_names(load_recipe(path))


def test_the_first_check_needs_no_torch(path):
    code = (
        "import sys; from megatron_gspo.config import load_recipe; from megatron_gspo.loop.check import check_names; "
        f"check_names(load_recipe({str(path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
