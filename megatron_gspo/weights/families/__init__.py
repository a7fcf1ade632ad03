"""The supported model families. A new one is one file here and one entry below; see docs/adding_a_family.md."""

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


def family_for(hf_config: HFConfig) -> Family:
    """The family of a model, by the `model_type` of its config.json. Raises ValueError naming the supported ones."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(docs/adding_a_family.md tells how to add one)"
        )
    return FAMILIES[model_type]
