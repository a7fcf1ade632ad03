"""Floating-point operations of a policy, counted from its HF config: what balances micro-batches and what MFU needs."""

from __future__ import annotations

from typing import Any

from megatron_gspo.policy.transformer_config import is_moe
from megatron_gspo.weights.families.qwen3_moe import num_experts, sparse_layers


def active_parameters(hf_config: dict[str, Any]) -> int:
    """Parameters that a token multiplies with: without the embedding, with the output layer. Qwen3 and Qwen3-MoE."""
    hidden, layers = hf_config["hidden_size"], hf_config["num_hidden_layers"]
    heads, kv_heads = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    head_dim = hf_config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = 3 * hidden * hf_config["intermediate_size"]
    routed, sparse = 0, 0
    if is_moe(hf_config):
        active, experts = hf_config["num_experts_per_tok"], num_experts(hf_config)
        routed = 3 * hidden * hf_config["moe_intermediate_size"] * active + hidden * experts
        sparse = len(sparse_layers(hf_config))
    mlp = sparse * routed + (layers - sparse) * dense
    return layers * attention + mlp + hidden * hf_config["vocab_size"]


def attention_cost(hf_config: dict[str, Any]) -> float:
    """Attention FLOPs of a sequence of length L are this x L^2, in units of one token's FLOPs in all other layers.

    Causal: L^2 / 2 pairs, two products of 2 x head_dim x heads each, against 2 x active parameters a token.
    """
    heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    return hf_config["num_hidden_layers"] * heads * head_dim / active_parameters(hf_config)
