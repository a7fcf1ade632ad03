"""Whole runs of the trainer on the GPU against the same runs on the CPU path, given the same rollouts.

Tolerances. Both are in fp32, TF32 off; sums are taken in another order, through four layers and their gradients.
AdamW's eps is of the gradient's size, so that a step is smooth in the gradient (see tests/loop/test_layouts.py). Each
step starts from the weights of the one before, so that differences add up: metrics are compared to 1e-4 (relative),
weights after four optimizer steps of lr 1e-2 to 1e-5.
"""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest
import torch

from megatron_gspo.batch.record import write_record
from megatron_gspo.config import load_recipe
from megatron_gspo.loop import launch
from tests.gpu.process import CPU, GPU, in_process
from tests.loop.batches import make_batch
from tests.loop.test_resume import outcome
from tests.loop.tiny import tiny_checkpoint

pytestmark = pytest.mark.gpu

STEPS = 2
RECIPE = """
run: {{dir: {run_dir}, steps: {steps}}}
policy: {{hf: {policy}, dtype: {dtype}, optimizer: {{lr: 1e-2, eps: 1e-2, weight_decay: 0.01}}}}
objective: {{name: gspo, clip_low: {clip_low}, clip_high: {clip_high}}}
advantage: {{}}
batch: {{prompts: 6, samples: 4, mini_batches: 2, max_tokens: 160}}
data: {{source: sort_digits, max_prompt_tokens: 32}}
rollout: {{max_new_tokens: 48, temperature: 0.8, replay: {records}}}
reward: {{name: sort_digits}}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    """A policy, and a record of rollouts for every step."""
    policy, records = tiny_checkpoint(tmp_path_factory.mktemp("hf")), tmp_path_factory.mktemp("records")
    for step in range(STEPS):
        batch = make_batch(seed=step)
        rows = range(batch.index.n)
        write_record(records / f"step_{step:06d}", batch.index, batch.rows(rows), [{"row": row} for row in rows])
    return {"policy": policy, "records": records}


def recipe_file(directory: Path, inputs: dict[str, Path], **changes) -> Path:
    values = {"steps": STEPS, "dtype": "fp32", "clip_low": 2e-3, "clip_high": 3e-3} | inputs | changes
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(run_dir=directory / "run", **values))
    return path


def train(recipe: Path, resume: bool) -> int:
    """`megatron-gspo train` as the only rank of a launch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place)
    return launch.main(load_recipe(recipe), resume)


def run(recipe: Path, environment: dict[str, str], *, resume: bool = False) -> tuple[dict, list[dict]]:
    """(exported weights, metrics of each step) of a run."""
    assert in_process(train, recipe, resume, environment=environment) == 0
    return outcome(recipe.parent / "run")


@pytest.fixture(scope="module")
def on_gpu(inputs, tmp_path_factory) -> tuple[dict, list[dict]]:
    return run(recipe_file(tmp_path_factory.mktemp("gpu"), inputs), GPU)


def assert_same(found: tuple[dict, list[dict]], expected: tuple[dict, list[dict]]) -> None:
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=2e-6), (name, theirs["step"])
    assert found[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_gives_the_numbers_of_the_cpu_path(on_gpu, inputs, tmp_path):
    expected = run(recipe_file(tmp_path, inputs), CPU)
    clipped = [step["objective/clip_fraction"] for step in expected[1]]
    assert all(0.05 < share < 0.95 for share in clipped), "it would prove little if nothing were clipped or everything"
    assert_same(on_gpu, expected)


def test_a_resumed_run_goes_on_from_its_checkpoint(on_gpu, inputs, tmp_path):
    recipe = recipe_file(tmp_path, inputs, steps=1)
    _, first = run(recipe, GPU)
    assert [step["step"] for step in first] == [0]
    recipe.write_text(recipe.read_text().replace("steps: 1", f"steps: {STEPS}"))
    assert_same(run(recipe, GPU, resume=True), on_gpu)


def test_in_bf16_score_and_update_are_the_same_to_the_last_bit(inputs, tmp_path):
    """At the paper's clip range the run stops unless |log s| of the first mini-batch is below 3e-5; one bf16 rounding
    that differed between scoring and updating would move it by 1e-3."""
    recipe = recipe_file(tmp_path, inputs, dtype="bf16", clip_low=3e-4, clip_high=4e-4)
    weights, metrics = run(recipe, GPU)
    assert len(metrics) == STEPS and all(math.isfinite(step["policy/grad_norm"]) for step in metrics)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "run" / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
