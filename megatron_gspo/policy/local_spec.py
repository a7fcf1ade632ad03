"""The CPU twin of the Transformer Engine block spec: Megatron's local spec with a few kinds of module replaced."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gspo.policy.local_attention import LocalAttention
from megatron_gspo.policy.local_linear import LocalColumnGroupedLinear, LocalReplicatedLinear, LocalRowGroupedLinear


class LocalNorm(torch.nn.RMSNorm):
    """torch's RMSNorm. Under sequence parallelism a rank sees a part of the tokens: Megatron must sum its gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class _GroupedExperts(LocalSpecProvider):
    """Megatron's local backend has no grouped experts (weight0 .. of one module); everything else is its own."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        linears = GroupedMLPSubmodules(linear_fc1=LocalColumnGroupedLinear, linear_fc2=LocalRowGroupedLinear)
        return partial(TEGroupedMLP, submodules=linears)


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Spec of the decoder layers of one chunk of this pipeline stage.

    Unlike Transformer Engine's, norms before the linears are modules (and parameters) of their own.
    """
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = LocalNorm
        attention = parts.self_attention.submodules
        attention.core_attention = LocalAttention
        if config.multi_latent_attention:
            attention.linear_q_down_proj = attention.linear_kv_down_proj = LocalReplicatedLinear
            attention.q_layernorm = attention.kv_layernorm = LocalNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
        moe = _is_moe(parts.mlp)
        if moe:
            parts.mlp = get_mlp_module_spec_for_backend(
                _GroupedExperts(), num_experts=config.num_moe_experts, moe_grouped_gemm=True
            )
        parts.sharded_state_dict_keys_map = _names_in_checkpoints(config, moe)
    spec.layer_norm = LocalNorm
    return spec


def _names_in_checkpoints(config: TransformerConfig, moe: bool) -> dict[str, str]:
    """Prefixes of norms that Transformer Engine's spec fuses into a linear, to those that it gives them there: what a
    CPU writes, a GPU reads. Megatron's own map knows neither experts nor latents."""
    attention = "self_attention."
    if config.multi_latent_attention:
        names = {f"{attention}{x}_layernorm.": f"{attention}linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    else:
        names = {"input_layernorm.": f"{attention}linear_qkv.layer_norm_"}
    return names if moe else names | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _is_moe(mlp: Any) -> bool:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return mlp.func is MoELayer
