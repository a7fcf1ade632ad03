"""Qwen3, dense: QK-norm, no biases."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import attention, dense_mlp, embeddings, norms
from megatron_gspo.weights.families.decoder import decoder, rope, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.rules import Rule


def architecture(c: HFConfig) -> Architecture:
    refuse(
        c, attention_bias=(bool(c.get("attention_bias")), "Megatron has a bias on QKV only or on every linear layer")
    )
    need(c, "head_dim")  # of its own in this family: transformers would fill in 128
    return Architecture(transformer=decoder(c, qk_layernorm=True), rope=rope(c), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    return [*embeddings(c), *norms(c, layers), *attention(c, layers, qk_norm=True), *dense_mlp(c, layers)]


FAMILY = Family(model_type="qwen3", architecture=architecture, rules=rules)
