"""Mixtral: transformers' numbers on every layout, both formats that transformers writes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.families import family_for, mixtral
from megatron_gspo.weights.load import load_hf
from tests.ranks import run_ranks
from tests.weights.families.published import config, num_parameters
from tests.weights.models import SHAPE, built
from tests.weights.parity import Checkpoints, assert_parity, case, sent_equal, write


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    shape = SHAPE | {"num_local_experts": 4, "intermediate_size": 24}
    untied = write(root / "untied", MixtralForCausalLM(MixtralConfig(**shape)))
    untied[1].save_pretrained(root / "stacked", save_original_format=False)
    return {
        "untied": untied,
        "tied": write(root / "tied", MixtralForCausalLM(MixtralConfig(**shape, tie_word_embeddings=True))),
    }


WORLDS = {
    1: [case("untied"), case("tied")],
    2: [
        case("untied", tp=2),
        case("tied", pp=2, vpp=2),
        case("untied", cp=2),
        case("untied", ep=2),
        case("untied", etp=2),
    ],
    4: [case("untied", ep=2, etp=2)],
    8: [case("tied", tp=2, ep=2, pp=2)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


def test_swapped_gate_and_up_show(models: Checkpoints, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(mixtral.NAMES, "gate", "w3")
    monkeypatch.setitem(mixtral.NAMES, "up", "w1")
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(1, WORLDS[1], models, tmp_path)


def export_of_stacked(stacked: Path, original: Path, layout: LayoutConfig) -> dict[str, bool]:
    with built(stacked, layout) as (model, on):
        binding = bind(model.chunks, model.hf_config, on.pgs)
        load_hf(stacked, binding)
        return sent_equal(original, plan_export(binding))


def test_stacked_checkpoint_leaves_under_published_names(models: Checkpoints):
    original = models["untied"][0]
    by_rank = run_ranks(2, export_of_stacked, original.parent / "stacked", original, LayoutConfig(ep=2))
    equal = {name: same for sent in by_rank for name, same in sent.items()}
    assert all(equal.values())
    assert "model.layers.3.block_sparse_moe.gate.weight" in equal
    assert "model.layers.3.block_sparse_moe.experts.3.w2.weight" in equal


def test_published_model():
    assert num_parameters("mixtral-8x7b") == 46_702_792_704


def test_default_frequencies_are_those_of_transformers():
    c = config("mixtral-8x7b")
    del c["rope_theta"]
    rope = family_for(c).architecture(c).rope
    assert rope is not None and rope.parameters["rope_theta"] == MixtralConfig().rope_parameters["rope_theta"]


@pytest.mark.parametrize(("field", "value"), [("sliding_window", 4096), ("router_jitter_noise", 0.1)])
def test_what_changes_the_numbers_is_refused(field: str, value: float):
    c = config("mixtral-8x7b") | {field: value}
    with pytest.raises(ValueError, match=f"HF config, {field}"):
        family_for(c).architecture(c)
