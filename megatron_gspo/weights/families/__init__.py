"""The supported model families. A new one is a file here and its name in both lists; see docs/adding_a_family.md."""

from __future__ import annotations

from megatron_gspo.weights.families import (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    kimi_k2,
    llama,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from megatron_gspo.weights.families.family import Family, HFConfig

_MODULES = (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    kimi_k2,
    llama,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
_GATED_DELTA_NET = (
    "Megatron-Core 0.19.2 computes its linear attention (ssm/gated_delta_net) by flash-linear-attention's GPU kernels "
    "alone: without them it does not build, and its fallback in torch takes no packed rows. Nothing here proves it yet"
)
UNSUPPORTED = dict.fromkeys(
    ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTA_NET
)


def family_for(hf_config: HFConfig) -> Family:
    """The family of a model, by the `model_type` of its config.json. Raises ValueError naming the supported ones, or
    saying why one that is asked for is not among them."""
    model_type = hf_config.get("model_type")
    if model_type in UNSUPPORTED:
        raise ValueError(f"config.json: model_type {model_type!r} is not supported: {UNSUPPORTED[model_type]}")
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(docs/adding_a_family.md tells how to add one)"
        )
    return FAMILIES[model_type]
