"""Megatron's TransformerConfig and GPTModel arguments from an HF config, a recipe's policy section and a layout.

Three kinds of fields. Derived ones follow from the HF config, the layout or the training step and are refused in
`policy.megatron`; the others are defaults for reinforcement learning and for the platform, which a recipe may change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_gspo.config.schema import Dtype, PolicyConfig
from megatron_gspo.policy.cpu import on_gpu
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.overrides import checked_overrides
from megatron_gspo.weights.families.family import Architecture

TORCH_DTYPE = {Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}


def transformer_config(
    architecture: Architecture, policy: PolicyConfig, layout: Layout, *, num_further: int = 0
) -> TransformerConfig:
    """The configuration of one rank's model chunks, `num_further` multi-token-prediction layers among them. Raises
    ValueError for refused overrides."""
    model = dict(architecture.transformer)
    derived = {
        "it follows from the HF config": model,
        "set it through policy.layout": _parallelism(layout, num_further),
        "set it through policy.dtype": _precision(policy.dtype),
        "the training step needs it so": _training_step(),
        "set it through policy.mtp": _further(num_further, layout),
    }
    if not on_gpu():
        derived["the CPU path needs it so"] = _cpu()
    reasons = {name: reason for reason, fields in derived.items() for name in fields} | _REFUSED
    fixed = {name: value for fields in derived.values() for name, value in fields.items()}
    if architecture.sparse_layers and model["add_bias_linear"] and layout.etp > 1:
        raise ValueError(
            f"policy.layout.etp = {layout.etp}: Megatron's experts have biases at etp 1 only; use ep instead"
        )
    defaults = _gpu(architecture, layout) if on_gpu() else {}
    if architecture.sparse_layers:
        defaults |= _moe_defaults()
    cls = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    overrides = checked_overrides(cls, policy.megatron, reasons, "policy.megatron")
    fields = defaults | fixed | overrides
    if fields.get("moe_aux_loss_coeff") and fields.get("moe_router_load_balancing_type", "none") == "none":
        raise ValueError(
            f"policy.megatron.moe_aux_loss_coeff = {fields['moe_aux_loss_coeff']} has no effect while "
            "moe_router_load_balancing_type is none; set policy.megatron.moe_router_load_balancing_type: aux_loss too"
        )
    config = cls(**fields)
    stages = config.virtual_pipeline_model_parallel_size or 1
    if stages != layout.vpp:
        raise ValueError(
            f"policy.layout: pipeline_layout {layout.pipeline_layout!r} describes {stages} virtual stages per rank, "
            f"but vpp is {layout.vpp}; make them agree"
        )
    return config


def _parallelism(layout: Layout, num_further: int) -> dict[str, Any]:
    stages = layout.pipeline_layout
    if stages and not num_further:  # of a critic or a reference policy beside a policy that has such layers
        stages = re.sub(r"m(\*\d+)?", "", stages)
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": stages,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
    }


def _precision(dtype: Dtype) -> dict[str, Any]:
    return {
        "bf16": dtype is Dtype.bf16,
        "fp16": False,
        "params_dtype": TORCH_DTYPE[dtype],
        "pipeline_dtype": TORCH_DTYPE[dtype],
    }


def _training_step() -> dict[str, Any]:
    return {
        "calculate_per_token_loss": True,  # DDP sums gradients; the objective has divided by global denominators
        "variable_seq_lengths": False,  # every micro-batch of a mini-batch has one padded length
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "deallocate_pipeline_outputs": True,
    }


def _further(count: int, layout: Layout) -> dict[str, Any]:
    """Multi-token-prediction layers behind the decoder's last layer, on its stage: they are built like it."""
    if count and layout.pipeline_layout:
        *earlier, last = PipelineParallelLayerLayout.parse_str_to_list(layout.pipeline_layout)
        kinds = [kind.name for kind in last]
        if kinds.count("mtp") != count or "decoder" not in kinds or any(LayerType.mtp in stage for stage in earlier):
            raise ValueError(
                f"policy.layout.pipeline_layout: {layout.pipeline_layout!r} must put {count} multi-token-prediction "
                f"layers (m, policy.mtp: train) behind a layer of the last stage: it ends in 't{'m' * count}L'"
            )
    return {
        "mtp_num_layers": count or None,
        "mtp_detach_heads": bool(count),
        "mtp_use_repeated_layer": False,
        "mtp_standalone": False,
    }


def _moe_defaults() -> dict[str, Any]:
    """Routing for RL: dropless, in fp32, and without losses of its own, whatever the HF config asks of pre-training."""
    return {
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": on_gpu(),
    }


def _gpu(architecture: Architecture, layout: Layout) -> dict[str, Any]:
    """Fused kernels of Transformer Engine. Apex's fused weight gradient is used where Megatron finds it.

    The fused rotary embedding of packed rows would leave out YaRN's factor in silence.
    """
    from megatron.core.tensor_parallel import layers

    plain_rope = architecture.rope is not None and architecture.rope.frequencies()[1] == 1.0
    model = architecture.transformer
    if layout.cp > 1 and "window_size" in model:
        _check_heads(model, layout)

    return {
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,
        "apply_rope_fusion": plain_rope,
        "bias_activation_fusion": True,
        # Grouped experts with biases refuse it.
        "bias_dropout_fusion": not (architecture.sparse_layers and model["add_bias_linear"]),
        "cp_comm_type": "a2a" if "window_size" in model else "p2p",
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


def _check_heads(model: Mapping[str, Any], layout: Layout) -> None:
    """Transformer Engine has windows and sinks under CP only where ranks exchange heads for tokens (a2a)."""
    for field in ("num_attention_heads", "num_query_groups"):
        heads = model[field]
        if heads % (layout.tp * layout.cp):
            raise ValueError(
                f"policy.layout.cp = {layout.cp}: with sliding windows it must divide the {heads // layout.tp} heads "
                f"that each of tp {layout.tp} ranks has of {field} {heads}"
            )


def _cpu() -> dict[str, Any]:
    """No fused kernels, and point-to-point messages one by one: gloo silently mixes up batched ones under PP x VPP."""
    return {
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": False,
        "cp_comm_type": "all_gather",
    }


_REFUSED = {
    "num_layers_in_first_pipeline_stage": "describe uneven stages by policy.layout.pipeline_layout",
    "num_layers_in_last_pipeline_stage": "describe uneven stages by policy.layout.pipeline_layout",
    "account_for_embedding_in_pipeline_split": "describe uneven stages by policy.layout.pipeline_layout",
    "account_for_loss_in_pipeline_split": "describe uneven stages by policy.layout.pipeline_layout",
    "finalize_model_grads_func": "the training step sets it",
    "grad_scale_func": "the training step sets it",
    "moe_grad_scale_func": "the training step sets it",
    "mtp_grad_scale_func": "the loss of multi-token-prediction layers is not Megatron's",
    "no_sync_func": "the training step sets it",
    "grad_sync_func": "the training step sets it",
    "param_sync_func": "the training step sets it",
    "cross_entropy_loss_fusion": "log-probabilities have a kernel of their own",
    "cross_entropy_fusion_impl": "log-probabilities have a kernel of their own",
    "fp8_output_proj": "log-probabilities need the output layer in high precision",
    "defer_embedding_wgrad_compute": "the output layer's gradient is computed with the log-probabilities",
    "use_mup": "the parametrisation is that of the HF checkpoint",
    "timers": "it is not a value that a recipe can hold",
}
