"""Qwen2-MoE: transformers' numbers on every layout, the shared expert's gate among them, and the published model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.weights.families.published import num_parameters
from tests.weights.models import EXPERTS, SHAPE
from tests.weights.parity import Checkpoints, assert_parity, case, write


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    shape = SHAPE | EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 40}
    mixed = {"mlp_only_layers": [1], "tie_word_embeddings": True, "norm_topk_prob": True}
    return {
        "untied": write(root / "untied", Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape))),
        "mixed": write(root / "mixed", Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape | mixed))),
        "no_bias": write(root / "no_bias", Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, qkv_bias=False))),
    }


WORLDS = {
    1: [case("untied"), case("mixed"), case("no_bias")],
    2: [
        case("untied", tp=2),
        case("mixed", pp=2, vpp=2),
        case("untied", cp=2),
        case("mixed", ep=2),
        case("untied", etp=2),
    ],
    4: [case("untied", ep=2, etp=2), case("mixed", tp=4)],
    8: [case("mixed", tp=2, ep=2, pp=2), case("untied", tp=2, cp=2, pp=2, ep=4)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


def test_published_model():
    assert num_parameters("qwen1.5-moe-a2.7b") == 14_315_784_192
