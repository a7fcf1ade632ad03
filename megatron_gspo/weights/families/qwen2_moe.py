"""Qwen1.5 and Qwen2 with mixture-of-experts layers: biases on QKV, and a shared expert behind a sigmoid gate."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import (
    HF_LAYER,
    LAYER,
    attention,
    copy,
    dense_mlp,
    embeddings,
    experts,
    norms,
    router,
    swiglu,
)
from megatron_gspo.weights.families.decoder import decoder, rope, softmax_experts, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need
from megatron_gspo.weights.families.qwen3_moe import num_experts, sparse_layers
from megatron_gspo.weights.rules import Rule


def qkv_bias(c: HFConfig) -> bool:
    """Whether queries, keys and values have biases: all published models do, and their configs do not say it."""
    return bool(c.get("qkv_bias", True))


def architecture(c: HFConfig) -> Architecture:
    mixture = softmax_experts(
        c,
        sparse=sparse_layers(c),
        experts=num_experts(c),
        ffn=need(c, "moe_intermediate_size"),
        normalise=c.get("norm_topk_prob", False),
    )
    shared = {
        "moe_shared_expert_intermediate_size": need(c, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }
    return Architecture(
        transformer=decoder(c, add_qkv_bias=qkv_bias(c), **mixture, **shared), rope=rope(c), tied=tied(c)
    )


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    sparse, hidden = sparse_layers(c), need(c, "hidden_size")
    width = need(c, "shared_expert_intermediate_size")
    gate = copy(
        HF_LAYER + "mlp.shared_expert_gate.weight",
        (1, hidden),
        LAYER + "mlp.shared_experts.gate_weight",
        layers=sparse,
    )
    return [
        *embeddings(c),
        *norms(c, layers),
        *attention(c, layers, qkv_bias=qkv_bias(c)),
        *dense_mlp(c, [layer for layer in layers if layer not in sparse]),
        *router(c, sparse, num_experts(c)),
        *experts(c, sparse, num_experts(c), need(c, "moe_intermediate_size")),
        *swiglu("mlp.shared_experts.", hidden, width, sparse, hf_name="mlp.shared_expert."),
        gate,
    ]


FAMILY = Family(model_type="qwen2_moe", architecture=architecture, rules=rules)
