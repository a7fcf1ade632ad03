"""Floating-point operations of a policy, counted from its HF config: what balances micro-batches and what MFU needs."""

from __future__ import annotations

from typing import Any


def active_parameters(hf_config: dict[str, Any]) -> int:
    """Parameters that a token multiplies with: without the embedding, with the output layer. Qwen3 and Qwen3-MoE."""
    hidden, layers = hf_config["hidden_size"], hf_config["num_hidden_layers"]
    heads, kv_heads = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    head_dim = hf_config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = 3 * hidden * hf_config["intermediate_size"]
    experts = hf_config.get("num_experts")
    if experts:
        routed = 3 * hidden * hf_config["moe_intermediate_size"] * hf_config["num_experts_per_tok"] + hidden * experts
        sparse_layers = sum(is_sparse_layer(hf_config, layer) for layer in range(layers))
    else:
        routed, sparse_layers = 0, 0
    mlp = sparse_layers * routed + (layers - sparse_layers) * dense
    return layers * attention + mlp + hidden * hf_config["vocab_size"]


def is_sparse_layer(hf_config: dict[str, Any], layer: int) -> bool:
    """Whether `layer` (from 0) is an MoE layer: transformers' rule for `decoder_sparse_step` and `mlp_only_layers`."""
    step = hf_config.get("decoder_sparse_step", 1)
    return layer not in hf_config.get("mlp_only_layers", []) and step > 0 and (layer + 1) % step == 0


def attention_cost(hf_config: dict[str, Any]) -> float:
    """Attention FLOPs of a sequence of length L are this x L^2, in units of one token's FLOPs in all other layers.

    Causal: L^2 / 2 pairs, two products of 2 x head_dim x heads each, against 2 x active parameters a token.
    """
    heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    return hf_config["num_hidden_layers"] * heads * head_dim / active_parameters(hf_config)
