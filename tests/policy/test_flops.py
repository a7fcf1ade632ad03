"""Counts against a model that transformers builds, and against attention counted by hand."""

from __future__ import annotations

import torch
from transformers import GptOssConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_gspo.policy.flops import active_parameters, attention_cost

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def _matrices(model: torch.nn.Module) -> int:
    embedding = model.get_input_embeddings().weight.numel()
    return sum(p.numel() for p in model.parameters() if p.dim() > 1) - embedding


def test_a_dense_model_multiplies_with_all_its_matrices():
    config = Qwen3Config(**SIZES)
    assert active_parameters(config.to_dict()) == _matrices(Qwen3ForCausalLM(config))


def test_a_moe_multiplies_with_its_top_k_only():
    config = Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[0]
    )
    idle = 2 * (8 - 2) * 3 * 64 * 48  # in two sparse layers
    assert active_parameters(config.to_dict()) == _matrices(Qwen3MoeForCausalLM(config)) - idle


def test_windows_cost_no_square():
    config = GptOssConfig(**SIZES | {"num_hidden_layers": 4}, num_local_experts=4, num_experts_per_tok=2).to_dict()
    full = config | {"layer_types": ["full_attention"] * 4}
    assert 2 * attention_cost(config) == attention_cost(full)  # every other layer has a window


def test_attention_by_hand():
    config = Qwen3Config(**SIZES).to_dict()
    length = 100
    pairs = length**2 / 2
    attention = 3 * 4 * pairs * 2 * (2 * 16)  # layers, heads, pairs, two products of a multiply and an add per element
    linear = 2 * active_parameters(config)
    assert attention_cost(config) * length**2 == attention / linear
