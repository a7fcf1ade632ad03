"""Llama 2 and 3: no biases; Llama 3.1 and later stretch the rotary frequencies, 3.2 ties the embeddings."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import attention, dense_mlp, embeddings, norms
from megatron_gspo.weights.families.decoder import decoder, rope, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.rules import Rule


def architecture(c: HFConfig) -> Architecture:
    only = "Megatron has biases on QKV only or on every linear layer"
    refuse(c, attention_bias=(bool(c.get("attention_bias")), only), mlp_bias=(bool(c.get("mlp_bias")), only))
    return Architecture(transformer=decoder(c), rope=rope(c), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    return [*embeddings(c), *norms(c, layers), *attention(c, layers), *dense_mlp(c, layers)]


FAMILY = Family(model_type="llama", architecture=architecture, rules=rules)
