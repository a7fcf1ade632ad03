"""GLM-4.5 and 4.6: transformers' numbers on every layout, and the sizes of the published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.weights.families.published import assert_tensors_of, num_parameters
from tests.weights.parity import Checkpoints, assert_parity, case, write

SHAPE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attention_bias=True,
    use_qk_norm=True,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    max_position_embeddings=64,
    initializer_range=0.2,
    num_mtp_layers=0,
)


def model(**shape: Any) -> Glm4MoeForCausalLM:
    torch.manual_seed(0)
    made = Glm4MoeForCausalLM(Glm4MoeConfig(**{**SHAPE, **shape}))
    for name, bias in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.3)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("glm4_moe")
    return {
        "4.5": write(root / "4.5", model(head_dim=16)),  # more than hidden_size / heads
        "air": write(root / "air", model(use_qk_norm=False, tie_word_embeddings=True, vocab_size=130)),
        "no bias": write(root / "no bias", model(attention_bias=False, first_k_dense_replace=0, n_shared_experts=2)),
    }


WORLDS = {
    1: [case("4.5"), case("air"), case("no bias")],
    2: [
        case("4.5", tp=2),
        case("air", pp=2, vpp=2),
        case("4.5", cp=2),
        case("4.5", ep=2),
        case("air", etp=2),
    ],
    4: [case("4.5", tp=4), case("air", ep=2, etp=2), case("no bias", tp=2, cp=2, ep=4)],
    8: [case("4.5", tp=2, ep=2, pp=2)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


PUBLISHED = {"glm-4.5-air": 106_852_251_264, "glm-4.5": 352_797_829_024}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str):
    assert num_parameters(name) == PUBLISHED[name]
    assert_tensors_of(name, Glm4MoeForCausalLM)
