"""A mini-batch without a token that trains leaves policy and critic as they are: no step by momentum or decay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from megatron_gspo.config import load_recipe
from megatron_gspo.loop import worker
from megatron_gspo.loop.report import StepReport
from megatron_gspo.loop.signals import StopRequest
from megatron_gspo.objective import sft_loss
from megatron_gspo.policy.layout import init_layout
from tests.loop.batches import PROMPTS, SAMPLES, write_records
from tests.loop.tiny import tiny_checkpoint
from tests.ranks import run_ranks
from tools.make_demo_policy import make_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A policy, and records of a step that trains and of one that does not."""
    directory = tmp_path_factory.mktemp("data")
    make_tokenizer().save_pretrained(tiny_checkpoint(directory / "hf"))
    write_records(directory / "records", steps=2, masked=[1])
    return directory


def recipe_file(folder: Path, data: Path, steps: int) -> Path:
    recipe = {
        "run": {"dir": str(folder / f"run_{steps}"), "steps": steps, "save_every": 0},
        "policy": {
            "hf": str(data / "hf"),
            "dtype": "fp32",
            "layout": {},
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "schedule": "constant"},
        },
        "objective": {"name": "ppo", "on_policy_check": "warn"},
        "batch": {"prompts": PROMPTS, "samples": SAMPLES, "mini_batches": 2, "max_tokens": 128},
        "data": {"source": "sort_digits", "max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 40, "replay": str(data / "records")},
        "reward": {"name": "sort_digits"},
    }
    path = folder / f"{steps}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def critics_after(paths: list[Path]) -> list[dict[str, torch.Tensor]]:
    """This rank's critic after each of the recipes."""
    critics: list[dict[str, torch.Tensor]] = []

    def keep(run_dir, state, saves, *args, **kwargs) -> Path:
        chunks = saves["critic"].keywords["chunks"]
        critics.append({name: p.detach().clone() for name, p in chunks[0].named_parameters()})
        return Path("unsaved")

    layout = init_layout(load_recipe(paths[0]).policy.layout)
    worker.init_layout = lambda *args, **kwargs: layout
    worker.save_checkpoint = keep
    for path in paths:
        recipe = load_recipe(path)
        report = StepReport(recipe, is_main=dist.get_rank() == 0)
        stop = StopRequest(dist.group.WORLD, grace_s=0.0)
        worker.train_and_export(recipe, torch.device("cpu"), dist.group.WORLD, stop, report, None, False)
        report.close()
    return critics


def test_weights_stay_and_the_updates_are_counted_as_skipped(data, tmp_path):
    """On two DP ranks, in the second step; Adam has moved every weight in the first one."""
    paths = [recipe_file(tmp_path, data, steps) for steps in (1, 2)]
    for before, after in run_ranks(2, critics_after, paths):
        for name, parameter in before.items():
            assert torch.equal(after[name], parameter), name
    before, after = (
        {k: v for p in (tmp_path / f"run_{n}" / "hf").glob("*.safetensors") for k, v in load_file(p).items()}
        for n in (1, 2)
    )
    start = load_file(data / "hf" / "model.safetensors")
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert not any(torch.equal(start[name], tensor) for name, tensor in before.items() if "layernorm" in name)
    first, second = map(json.loads, (tmp_path / "run_2" / "metrics.jsonl").read_text().splitlines())
    for model in ("policy", "critic"):
        assert (first[f"{model}/updates"], first[f"{model}/skipped_updates"]) == (2, 0)
        assert (second[f"{model}/updates"], second[f"{model}/skipped_updates"]) == (2, 2)
        assert second[f"{model}/grad_norm"] == 0
    assert second["objective/loss"] == second["critic/loss"] == 0


def test_a_supervised_mini_batch_without_tokens_has_no_loss():
    logp = torch.zeros(3, requires_grad=True)
    loss, _ = sft_loss(logp, torch.zeros(3, dtype=torch.bool), num_tokens=0)
    loss.backward()
    assert loss == 0 and logp.grad is not None and not logp.grad.any()
