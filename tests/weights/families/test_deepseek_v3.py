"""DeepSeek-V3 and Kimi-K2: transformers' numbers on every layout, and the sizes of the published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.weights.parity import Checkpoints, assert_parity, case, write

# Frequencies that YaRN changes, values narrower than keys, and groups of experts that not every token may use.
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    beta_fast=4.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=16,
)
SHAPE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=2,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    max_position_embeddings=64,
    initializer_range=0.2,
    rope_parameters=YARN,
    num_mtp_layers=0,
    pad_token_id=None,
)
PLAIN = dict(
    q_lora_rank=None,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-3,  # far from that of the latents' norms
    rope_parameters=dict(rope_type="default", rope_theta=50000.0),
)


def model(**shape: Any) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    made = DeepseekV3ForCausalLM(DeepseekV3Config(**{**SHAPE, **shape}))
    for name, bias in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.3)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("deepseek_v3")
    return {
        "v3": write(root / "v3", model()),
        "plain": write(root / "plain", model(**PLAIN)),
        "tied": write(
            root / "tied",
            model(tie_word_embeddings=True, vocab_size=130, rope_parameters={**YARN, "mscale_all_dim": 0.707}),
        ),
    }


WORLDS = {
    1: [case("v3"), case("plain"), case("tied")],
    2: [
        case("v3", tp=2),
        case("plain", tp=2),
        case("v3", pp=2),
        case("tied", pp=2, vpp=2),
        case("v3", cp=2),
        case("v3", ep=2),
        case("plain", etp=2),
    ],
    4: [case("v3", tp=4), case("tied", ep=2, etp=2), case("plain", tp=2, cp=2, ep=4)],
    8: [case("v3", tp=2, ep=2, pp=2)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)
