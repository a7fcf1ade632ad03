"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import attention, dense_mlp, embeddings, norms
from megatron_gspo.weights.families.decoder import decoder, rope, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need
from megatron_gspo.weights.rules import Rule


def architecture(c: HFConfig) -> Architecture:
    return Architecture(transformer=decoder(c, add_qkv_bias=True), rope=rope(c), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    return [*embeddings(c), *norms(c, layers), *attention(c, layers, qkv_bias=True), *dense_mlp(c, layers)]


FAMILY = Family(model_type="qwen2", architecture=architecture, rules=rules)
