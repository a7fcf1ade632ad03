"""GLM-4.5 and 4.6: the mixture of DeepSeek-V3 under grouped-query attention, half of each head turned."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import attention, embeddings, norms
from megatron_gspo.weights.families.decoder import decoder, rope, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need
from megatron_gspo.weights.families.sigmoid_experts import further_layers, further_rules, mixture, mlps
from megatron_gspo.weights.rules import Rule


def architecture(c: HFConfig) -> Architecture:
    transformer = decoder(
        c, add_qkv_bias=bool(c.get("attention_bias")), qk_layernorm=bool(c.get("use_qk_norm")), **mixture(c)
    )
    turned = {"partial_rotary_factor": 0.5, **c}  # transformers' default for this family
    return Architecture(transformer=transformer, rope=rope(turned), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    return [*embeddings(c), *_attention(c, range(need(c, "num_hidden_layers"))), *mlps(c)]


def _attention(c: HFConfig, layers: range) -> list[Rule]:
    biased, normed = bool(c.get("attention_bias")), bool(c.get("use_qk_norm"))
    return [*norms(c, layers), *attention(c, layers, qkv_bias=biased, qk_norm=normed)]


FAMILY = Family(
    model_type="glm4_moe",
    architecture=architecture,
    rules=rules,
    further=further_layers,
    further_rules=lambda c: further_rules(c, _attention(c, further_layers(c))),
)
