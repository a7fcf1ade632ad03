"""Floating-point operations of a policy, counted from its HF config: what balances micro-batches and what MFU needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gspo.weights.families import family_for


def active_parameters(hf_config: dict[str, Any], num_further: int = 0) -> int:
    """Parameters that a token multiplies with: without the embedding, with the output layer.

    num_further: of multi-token-prediction layers that train, each a sparse layer behind a projection, with the output
    layer once more.
    """
    architecture = family_for(hf_config).architecture(hf_config)
    model, sparse = architecture.transformer, len(architecture.sparse_layers)
    hidden, dense = model["hidden_size"], model["num_layers"] - sparse
    layers, sparse = model["num_layers"] + num_further, sparse + num_further
    matrices = 3 if model["gated_linear_unit"] else 2
    mlp = dense * matrices * hidden * model["ffn_hidden_size"]
    if sparse:
        width = model["moe_ffn_hidden_size"] * model["moe_router_topk"]
        width += model.get("moe_shared_expert_intermediate_size") or 0
        mlp += sparse * hidden * (matrices * width + model["num_moe_experts"])
    heads = (1 + num_further) * hidden * hf_config["vocab_size"]
    return layers * _attention_parameters(model) + mlp + heads + num_further * 2 * hidden * hidden


def attention_cost(hf_config: dict[str, Any], num_further: int = 0) -> float:
    """Attention FLOPs of a sequence of length L are this x L^2, in units of one token's FLOPs in all other layers.

    Causal: L^2 / 2 pairs, a product of 2 x width x heads each with keys and one with values, against 2 x active
    parameters a token. Layers with a sliding window are left out: their cost grows with L, and by little.
    """
    model = family_for(hf_config).architecture(hf_config).transformer
    qk, v = _widths(model)
    layers = model["num_layers"] + num_further - sum(model.get("window_attn_skip_freq", ()))
    return layers * model["num_attention_heads"] * (qk + v) / 2 / active_parameters(hf_config, num_further)


def _widths(model: Mapping[str, Any]) -> tuple[int, int]:
    """Of one head of queries and keys, and of values."""
    if model.get("multi_latent_attention"):
        return model["qk_head_dim"] + model["qk_pos_emb_head_dim"], model["v_head_dim"]
    return model["kv_channels"], model["kv_channels"]


def _attention_parameters(model: Mapping[str, Any]) -> int:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    qk, v = _widths(model)
    if not model.get("multi_latent_attention"):
        return hidden * qk * 2 * (heads + model["num_query_groups"])
    rank = model["q_lora_rank"]
    queries = hidden * heads * qk if rank is None else rank * (hidden + heads * qk)
    latent = hidden * (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"])
    return queries + latent + model["kv_lora_rank"] * heads * (model["qk_head_dim"] + v) + heads * v * hidden
