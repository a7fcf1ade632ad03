"""Qwen3 with mixture-of-experts layers, all of them or some."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import attention, dense_mlp, embeddings, experts, norms, router
from megatron_gspo.weights.families.decoder import decoder, rope, softmax_experts, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.rules import Rule


def num_experts(c: HFConfig) -> int:
    """Experts of a sparse layer; transformers 5 renamed the field."""
    return need(c, "num_experts", "num_local_experts")


def sparse_layers(c: HFConfig) -> tuple[int, ...]:
    """Layers with experts, as transformers chooses them: every `decoder_sparse_step`-th one, less `mlp_only_layers`."""
    step, dense = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or ()
    layers = range(need(c, "num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def architecture(c: HFConfig) -> Architecture:
    refuse(
        c, attention_bias=(bool(c.get("attention_bias")), "Megatron has a bias on QKV only or on every linear layer")
    )
    mixture = softmax_experts(
        c,
        sparse=sparse_layers(c),
        experts=num_experts(c),
        ffn=need(c, "moe_intermediate_size"),
        normalise=c.get("norm_topk_prob", False),
    )
    return Architecture(transformer=decoder(c, qk_layernorm=True, **mixture), rope=rope(c), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    sparse = sparse_layers(c)
    dense = [layer for layer in layers if layer not in sparse]
    return [
        *embeddings(c),
        *norms(c, layers),
        *attention(c, layers, qk_norm=True),
        *dense_mlp(c, dense),
        *router(c, sparse, num_experts(c)),
        *experts(c, sparse, num_experts(c), need(c, "moe_intermediate_size")),
    ]


FAMILY = Family(model_type="qwen3_moe", architecture=architecture, rules=rules)
