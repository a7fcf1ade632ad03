"""Multi-token-prediction layers through the loop: the same step on every layout and cut, saved, resumed and exported.

Tolerances are those of `test_layouts`. The routers' z-loss is on, whose gradient counts the places that are no padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from megatron_gspo.config import load_recipe
from megatron_gspo.convert.to_hf import megatron_to_hf
from megatron_gspo.loop import worker
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.signals import StopRequest
from tests.loop.batches import PROMPTS, SAMPLES, write_records
from tests.loop.test_layouts import Outcome, assert_same, outcome, run_all
from tests.ranks import run_ranks
from tests.weights.families import test_deepseek_v3
from tests.weights.families.mtp import write_further
from tools.make_demo_policy import make_tokenizer

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "uneven": (2, {"pp": 2, "pipeline_layout": "Ettt|tmmL"}),
    "tp2_cp2_pp2_ep4": (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
}
REPEATS = {
    "model.embed_tokens.weight": [f"model.layers.{layer}.embed_tokens.weight" for layer in (4, 5)],
    "lm_head.weight": [f"model.layers.{layer}.shared_head.head.weight" for layer in (4, 5)],
}


def recipe_file(folder: Path, data: Path, layout: dict, max_tokens: int = 160, steps: int = 1, **policy) -> Path:
    optimizer = {"lr": 1e-2, "eps": 1e-2, "clip_grad": 1.0}
    recipe = {
        "run": {"dir": str(folder / "run"), "steps": steps, "save_every": 1, "keep_checkpoints": 0},
        "policy": {"hf": str(data / "hf"), "dtype": "fp32", "mtp": "train", "layout": layout, "optimizer": optimizer}
        | {"megatron": {"moe_z_loss_coeff": 0.01}}
        | policy,
        "objective": {"name": "gspo", "clip_low": 2e-3, "clip_high": 3e-3, "kl": {"coef": 0.1}},
        "advantage": {},
        "batch": {"prompts": PROMPTS, "samples": SAMPLES, "mini_batches": 2, "max_tokens": max_tokens},
        "data": {"source": "sort_digits", "max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 40, "temperature": 0.8, "replay": str(data / "records")},
        "reward": {"name": "sort_digits"},
        "observe": {"routing_changes": True},
    }
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def step(size: int, *recipe) -> Outcome:
    path = recipe_file(*recipe)
    run_ranks(size, run_all, [path], timeout_s=300)
    return outcome(path.parent / "run")


def write_data(directory: Path, **shape: Any) -> Path:
    write_further(directory / "hf", test_deepseek_v3.model(**shape), 2)
    make_tokenizer().save_pretrained(directory / "hf")
    write_records(directory / "records", steps=2)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory) -> Outcome:
    """One rank, everything in one micro-batch."""
    return step(1, tmp_path_factory.mktemp("expected"), data, {}, 1024)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_the_same_on_every_layout(name, expected, data, tmp_path):
    size, layout = LAYOUTS[name]
    assert_same({"gspo": step(size, tmp_path, data, layout)}, {"gspo": expected})


@pytest.mark.parametrize("max_tokens", [72, 400])
def test_a_step_is_the_same_however_it_is_cut(max_tokens, expected, data, tmp_path):
    assert_same({"gspo": step(1, tmp_path, data, {}, max_tokens)}, {"gspo": expected})


def test_all_of_it_trains_and_leaves(expected, data):
    metrics, weights, _ = expected
    before = load_file(data / "hf" / "model.safetensors")
    still = {name for name in before.keys() & weights.keys() if torch.equal(before[name], weights[name])}
    idle = ("e_score_correction_bias", ".experts.")  # two experts of the policy see no token
    assert [name for name in still if not any(kind in name for kind in idle)] == []
    assert not any(name.startswith(("model.layers.4.mlp.experts.", "model.layers.5.mlp.experts.")) for name in still)
    assert {name for name in before if ".experts." not in name} <= weights.keys()
    for name, repeats in REPEATS.items():
        assert all(torch.equal(weights[name], weights[repeat]) for repeat in repeats)
    assert 1.0 < metrics["policy/mtp_nll"] < 20.0


def test_the_policy_does_not_notice(expected, data, tmp_path):
    metrics, weights, _ = step(1, tmp_path, data, {}, 1024, 1)
    carried_metrics, carried, _ = _carry(data, tmp_path)
    assert carried_metrics == {name: value for name, value in metrics.items() if name != "policy/mtp_nll"}
    original = load_file(data / "hf" / "model.safetensors")
    for name, tensor in carried.items():
        later = name.startswith(("model.layers.4.", "model.layers.5."))
        assert torch.equal(tensor, original[name] if later else weights[name]), name


def _carry(data: Path, folder: Path) -> Outcome:
    path = recipe_file(folder / "carry", data, {}, 1024, mtp="carry")
    run_ranks(1, run_all, [path], timeout_s=300)
    return outcome(folder / "carry" / "run")


def whole_runs(paths: list[Path], resume: bool) -> None:
    for path in paths:
        recipe = load_recipe(path)
        report, stop = StepReport(recipe, is_main=dist.get_rank() == 0), StopRequest(dist.group.WORLD, grace_s=0.0)
        worker.train_and_export(recipe, torch.device("cpu"), dist.group.WORLD, stop, report, None, resume)
        report.close()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_checkpoint_holds_them(tmp_path):
    """Resumed, a run ends where one does that was never left; converted, it is its own export.

    Norms of 64: Megatron-Core 0.19.2 miscounts a bucket of its distributed optimizer that ends, before an embedding
    which two stages share, in a parameter that does not fill 64 elements (`_compute_per_buffer_param_layout`).
    """
    data, layout = write_data(tmp_path / "data", hidden_size=64), {"pp": 2}
    run_ranks(2, whole_runs, [recipe_file(tmp_path / "whole", data, layout, steps=2)], False, timeout_s=300)
    run_ranks(2, whole_runs, [recipe_file(tmp_path / "left", data, layout, steps=1)], False, timeout_s=300)
    run_ranks(2, whole_runs, [recipe_file(tmp_path / "left", data, layout, steps=2)], True, timeout_s=300)
    whole, left = (weights_of(tmp_path / name / "run" / "hf") for name in ("whole", "left"))
    assert whole.keys() == left.keys()
    assert all(torch.equal(whole[name], left[name]) for name in whole)
    (checkpoint,) = (tmp_path / "whole" / "run" / "checkpoints").glob("step_000002_*/policy")
    run_ranks(1, convert, checkpoint, tmp_path / "back", data / "hf")
    back = weights_of(tmp_path / "back")
    assert back.keys() == whole.keys()
    assert all(torch.equal(whole[name], back[name]) for name in whole)


def convert(checkpoint: Path, target: Path, source: Path) -> int:
    return megatron_to_hf(checkpoint, target, hf=source)
