"""OLMoE: experts in every layer, and QK-norm over all heads of a token."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import (
    HF_LAYER,
    LAYER,
    attention,
    copy,
    embeddings,
    experts,
    norms,
    router,
)
from megatron_gspo.weights.families.decoder import decoder, head_dim, kv_heads, rope, softmax_experts, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.rules import Rule


def architecture(c: HFConfig) -> Architecture:
    refuse(
        c,
        attention_bias=(bool(c.get("attention_bias")), "Megatron has a bias on QKV only or on every linear layer"),
        clip_qkv=(c.get("clip_qkv") is not None, "Megatron does not clip queries, keys and values"),
        rms_norm_eps=(need(c, "rms_norm_eps") != 1e-5, "SGLang has 1e-5 in its QK-norms"),
    )
    mixture = softmax_experts(
        c,
        sparse=range(need(c, "num_hidden_layers")),
        experts=need(c, "num_experts", "num_local_experts"),
        ffn=need(c, "intermediate_size"),
        normalise=c.get("norm_topk_prob", False),
    )
    return Architecture(
        transformer=decoder(c, qk_layernorm=True, **mixture), rope=rope(c), tied=tied(c), norm_all_heads=True
    )


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    n = need(c, "num_experts", "num_local_experts")
    heads = {"q": need(c, "num_attention_heads"), "k": kv_heads(c)}
    qk_norms = [
        copy(
            f"{HF_LAYER}self_attn.{x}_norm.weight",
            (count * head_dim(c),),
            f"{LAYER}self_attention.{x}_layernorm.weight",
            layers=layers,
        )
        for x, count in heads.items()
    ]
    return [
        *embeddings(c),
        *norms(c, layers),
        *attention(c, layers),
        *qk_norms,
        *router(c, layers, n),
        *experts(c, layers, n, need(c, "intermediate_size")),
    ]


FAMILY = Family(model_type="olmoe", architecture=architecture, rules=rules)
