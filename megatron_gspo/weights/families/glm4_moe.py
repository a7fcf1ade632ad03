"""GLM-4.5 and 4.6: the mixture of DeepSeek-V3 under grouped-query attention, half of each head turned."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import attention, embeddings, norms
from megatron_gspo.weights.families.decoder import decoder, rope, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need
from megatron_gspo.weights.families.sigmoid_experts import further_layers, mixture, mlps
from megatron_gspo.weights.rules import Rule


def architecture(c: HFConfig) -> Architecture:
    transformer = decoder(
        c, add_qkv_bias=bool(c.get("attention_bias")), qk_layernorm=bool(c.get("use_qk_norm")), **mixture(c)
    )
    turned = {"partial_rotary_factor": 0.5, **c}  # transformers' default for this family
    return Architecture(transformer=transformer, rope=rope(turned), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    biased, normed = bool(c.get("attention_bias")), bool(c.get("use_qk_norm"))
    return [
        *embeddings(c),
        *norms(c, layers),
        *attention(c, layers, qkv_bias=biased, qk_norm=normed),
        *mlps(c),
    ]


FAMILY = Family(model_type="glm4_moe", architecture=architecture, rules=rules, carried=further_layers)
