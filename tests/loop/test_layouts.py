"""The product's first promise: a step gives the same loss, metrics, gradients and weights on every layout and cut.

Every objective of the family runs one whole step of the real loop (score, two mini-batches, export) from the same
recorded rollouts. Tolerances: everything runs in fp32 with log-ratio sums in fp64. Sums over ranks and micro-batches
are taken in another order than on one rank, which moves an element of a gradient by some fp32 ulps of the terms that
add up to it, and those are about as large as the largest of its tensor. So the gradients of policy and critic after
the reduction over data parallelism, whole and of both mini-batches (`tests/loop/gradients.py`), are compared to 2e-5
of the largest element of each tensor (6e-6 was seen). AdamW's first steps are the gradient's sign unless eps is of the
gradient's size, so eps is 1e-2 here: a step is then smooth in the gradient. Metrics (gradient norm included) are
compared to 2e-5, weights after two steps of lr 1e-2 to 2e-6. Quantiles of tokens are numbers of bfloat16, and may be
neighbours.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from megatron_gspo.config import OBJECTIVES, load_recipe
from megatron_gspo.loop import worker
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.policy.layout import init_layout
from tests.loop.batches import PROMPTS, SAMPLES, make_batch, write_records
from tests.loop.gradients import keep_gradients, load_gradients
from tests.loop.tiny import tiny_checkpoint
from tests.ranks import run_ranks
from tools.make_demo_policy import make_tokenizer

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2_etp2": (2, {"tp": 2, "etp": 2}),
    "cp2_ep2_dp2": (4, {"cp": 2, "ep": 2}),
    "tp2_ep2_pp2": (8, {"tp": 2, "ep": 2, "pp": 2}),
    "tp2_cp2_pp2_ep4": (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
}
# Trust regions narrow enough for one update of lr 1e-2 to clip some tokens. OTHER is another policy's checkpoint.
CHOSEN: dict[str, dict] = {
    "gspo": {"objective": {"clip_low": 2e-3, "clip_high": 3e-3}, "observe": {"routing_changes": True}},
    "gspo_token": {"objective": {"clip_low": 2e-3, "clip_high": 3e-3}, "advantage": {"estimator": "gae"}, "critic": {}},
    "grpo": {"objective": {"clip_low": 0.02, "clip_high": 0.02, "kl": {"coef": 0.1, "reference": "OTHER"}}},
    "ppo": {"objective": {"clip_low": 0.02, "clip_high": 0.02}, "critic": {"hf": "OTHER", "clip": 0.02}},
    "dapo": {"objective": {"clip_low": 0.02, "clip_high": 0.028}, "advantage": {"estimator": "leave_one_out"}},
    "dr_grpo": {"objective": {"clip_low": 0.02, "clip_high": 0.02}},
    "sapo": {},
    "cispo": {"objective": {"clip_high": 0.02}},
    "gmpo": {"objective": {"clip_low": 0.02, "clip_high": 0.02}},
    "vespo": {},
    "dppo": {"objective": {"delta": 1e-3, "max_ratio": 1.2}},
    "minirl": {"objective": {"clip_low": 0.02, "clip_high": 0.02, "max_weight": 1.3}},
    "sft": {},
}
CORRECTED = {
    "truncate": {"truncate": {"level": "token", "high": 1.2}},
    "product": {"truncate": {"level": "sequence_product", "high": 2.0}},
    "icepop": {"icepop": {"level": "sequence", "low": 0.8, "high": 1.2}, "opsm": {"delta": 0.02}},
    "sequence_mask": {"sequence_mask": {"low": 0.8, "high": 1.2}},
}
VARIANTS = CHOSEN | {
    f"gspo_{name}": CHOSEN["gspo"]
    | {"correction": section, "objective": CHOSEN["gspo"]["objective"] | {"name": "gspo"}}
    for name, section in CORRECTED.items()
}
QUANTILES = ("objective/token_log_ratio_p01", "objective/token_log_ratio_p99")
# Of a gradient, against the largest element of its tensor. VESPO's weight W^k exp(lambda (1 - W)) has the product over
# a response in it: after an update, the rounding of all its log-probabilities adds up, times k + lambda W.
GRADIENT_BOUNDS = {("vespo", "policy_1"): 1e-4}
Tensors = dict[str, torch.Tensor]
Outcome = tuple[dict[str, float], Tensors, Tensors]


def recipe_file(folder: Path, variant: str, layout: dict, max_tokens: int, data: Path) -> Path:
    chosen = VARIANTS[variant]
    optimizer = {"lr": 1e-2, "eps": 1e-2, "clip_grad": 1.0, "weight_decay": 0.01}
    recipe = {
        "run": {"dir": str(folder / variant), "steps": 1},
        "policy": {"hf": str(data / "hf"), "dtype": "fp32", "layout": layout, "optimizer": optimizer},
        "objective": {"name": variant} | chosen.get("objective", {}),
        "batch": {"prompts": PROMPTS, "samples": SAMPLES, "mini_batches": 2, "max_tokens": max_tokens},
        "data": {"source": "sort_digits", "max_prompt_tokens": 16},
    }
    if variant == "sft":
        recipe["batch"] = {"prompts": PROMPTS * SAMPLES, "mini_batches": 2, "max_tokens": max_tokens}
    else:
        recipe |= {"rollout": {"max_new_tokens": 40, "temperature": 0.8, "replay": str(data / "records")}}
        recipe |= {"reward": {"name": "sort_digits"}}
        recipe |= {name: chosen[name] for name in ("advantage", "critic", "correction", "observe") if name in chosen}
    path = folder / f"{variant}.yaml"
    path.write_text(yaml.safe_dump(recipe).replace("OTHER", str(data / "other")))
    return path


def run_all(paths: list[Path]) -> None:
    """One step of each recipe on this rank's world.

    Without what costs most and is not compared: checkpoints, and new process groups for every recipe.
    """
    recipes = [load_recipe(path) for path in paths]
    layout = init_layout(recipes[0].policy.layout)
    worker.init_layout = lambda *args, **kwargs: layout
    worker.save_checkpoint = lambda *args, **kwargs: Path("unsaved")
    keep_gradients("gradients")
    for recipe in recipes:
        report = StepReport(recipe, is_main=dist.get_rank() == 0)
        stop = StopRequest(dist.group.WORLD, grace_s=0.0)
        worker.train_and_export(recipe, torch.device("cpu"), dist.group.WORLD, stop, report, None, False)
        report.close()


def outcomes(size: int, folder: Path, layout: dict, max_tokens: int, data: Path) -> dict[str, Outcome]:
    run_ranks(size, run_all, [recipe_file(folder, name, layout, max_tokens, data) for name in VARIANTS], timeout_s=600)
    return {name: outcome(folder / name) for name in VARIANTS}


def outcome(run_dir: Path) -> Outcome:
    """The step's metrics without those that tell the time or the machine, the exported weights, and the gradients."""
    record = json.loads((run_dir / "metrics.jsonl").read_text())
    metrics = {name: x for name, x in record.items() if not name.startswith(("time/", "perf/"))}
    weights: dict[str, torch.Tensor] = {}
    for shard in (run_dir / "hf").glob("*.safetensors"):
        weights |= load_file(shard)
    return metrics, weights, load_gradients(run_dir / "gradients")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    make_tokenizer().save_pretrained(tiny_checkpoint(directory / "hf"))
    tiny_checkpoint(directory / "other", seed=2)
    write_records(directory / "records", steps=1)
    return directory


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory) -> dict[str, Outcome]:
    """One rank, everything in one micro-batch."""
    return outcomes(1, tmp_path_factory.mktemp("expected"), {}, 1024, data)


def assert_same(found: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    for variant, (metrics, weights, gradients) in expected.items():
        found_metrics, found_weights, found_gradients = found[variant]
        assert found_metrics.keys() == metrics.keys(), variant
        for name, value in metrics.items():
            rel = 2**-7 if name in QUANTILES else 2e-5
            assert found_metrics[name] == pytest.approx(value, rel=rel, abs=1e-6, nan_ok=True), (variant, name)
        assert found_weights.keys() == weights.keys(), variant
        for name, tensor in weights.items():
            torch.testing.assert_close(
                found_weights[name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name, v=variant: f"{v}: {n}: {m}"
            )
        assert found_gradients.keys() == gradients.keys(), variant
        for name, tensor in gradients.items():
            bound = GRADIENT_BOUNDS.get((variant, name.partition("/")[0]), 2e-5) * float(tensor.abs().max())
            torch.testing.assert_close(
                found_gradients[name], tensor, rtol=0, atol=bound, msg=lambda m, n=name, v=variant: f"{v}: {n}: {m}"
            )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_the_same_on_every_layout(name, expected, data, tmp_path):
    size, layout = LAYOUTS[name]
    assert_same(outcomes(size, tmp_path, layout, 160, data), expected)


@pytest.mark.parametrize("max_tokens", [72, 128, 400])
def test_a_step_is_the_same_however_it_is_cut(max_tokens, expected, data, tmp_path):
    assert_same(outcomes(1, tmp_path, {}, max_tokens, data), expected)


def test_an_update_changes_experts(expected):
    metrics, *_ = expected["gspo"]
    assert 0.02 < metrics["policy/routing_changed"] < metrics["policy/routing_changed_tokens"] < 0.9


def test_every_objective_takes_part():
    assert OBJECTIVES.keys() <= VARIANTS.keys()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("sapo", "vespo", "sft")])
def test_the_batch_is_hard_enough(variant, expected):
    """The comparison would prove little if nothing were clipped or everything were. The first mini-batch never is."""
    metrics, *_ = expected[variant]
    assert 0.02 < metrics["objective/clip_fraction"] < 0.48
    assert metrics["objective/abs_log_ratio_max"] > 2e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mini_batch_has_a_gradient(variant, expected):
    """Nearly everywhere: an expert may have no token. The critic's body has none while its head is still 0."""
    *_, gradients = expected[variant]
    models = ["policy", "critic"] if "critic" in VARIANTS[variant] else ["policy"]
    for part in (f"{model}_{number}" for model in models for number in range(2)):
        has_one = [bool(tensor.any()) for name, tensor in gradients.items() if name.startswith(f"{part}/")]
        assert sum(has_one) > 0.8 * len(has_one) or (part == "critic_0" and sum(has_one) == 1), (part, sum(has_one))


def test_the_batch_has_holes():
    batch = make_batch()
    trajectories = batch.rows(range(batch.index.n))
    assert (batch.index.trained_lens == 0).any()
    assert (batch.index.trained_lens < batch.index.response_lens).any()
    assert int(trajectories.loss_mask.sum()) == int(batch.index.trained_lens.sum())


def test_layout_is_what_was_asked():
    def sizes() -> tuple[int, int, int]:
        from megatron_gspo.config import LayoutConfig

        layout = init_layout(LayoutConfig(tp=2, cp=2))
        return (layout.tp, layout.cp, layout.dp)

    assert run_ranks(4, sizes) == [(2, 2, 1)] * 4
