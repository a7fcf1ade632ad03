"""gpt-oss: transformers' numbers on every layout that Megatron has for experts with biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from tests.weights.parity import Checkpoints, assert_parity, case, write

# Windows shorter than every document, activations beyond the clamp, and frequencies that YaRN changes without rounding.
SHAPE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=6,
    swiglu_limit=1.5,
    max_position_embeddings=64,
    initializer_range=0.2,
    pad_token_id=None,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
)


def model(**shape: Any) -> GptOssForCausalLM:
    torch.manual_seed(0)
    made = GptOssForCausalLM(GptOssConfig(**{**SHAPE, **shape}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("_bias"):  # [experts, ...], zeros when made
                parameter.normal_(std=0.3)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("gpt_oss")
    return {
        "plain": write(root / "plain", model()),
        "tied": write(root / "tied", model(tie_word_embeddings=True, vocab_size=130)),
        "layers": write(
            root / "layers",
            model(layer_types=["full_attention", "sliding_attention", "sliding_attention"], num_hidden_layers=3),
            max_shard_size="40KB",
        ),
    }


WORLDS = {
    1: [case("plain"), case("tied"), case("layers")],
    2: [
        case("plain", tp=2),
        case("tied", tp=2),
        case("plain", pp=2),
        case("tied", pp=2, vpp=2),
        case("layers", pp=2, pipeline_layout="Et|ttL"),
        case("plain", ep=2),
        case("plain", cp=2),
    ],
    4: [case("tied", tp=4), case("plain", tp=2, ep=4), case("layers", cp=2, ep=4)],
    8: [case("plain", tp=2, ep=2, pp=2), case("tied", tp=2, cp=2, pp=2, ep=4)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)
