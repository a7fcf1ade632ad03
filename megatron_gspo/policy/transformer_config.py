"""Megatron's TransformerConfig and GPTModel arguments from an HF config, a recipe's policy section and a layout.

Three kinds of fields. Derived ones follow from the HF config, the layout or the training step and are refused in
`policy.megatron`; the others are defaults for reinforcement learning and for the platform, which a recipe may change.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gspo.config.schema import Dtype, PolicyConfig
from megatron_gspo.policy.cpu import on_gpu
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.overrides import checked_overrides
from megatron_gspo.weights.families.qwen3_moe import num_experts, sparse_layers

TORCH_DTYPE = {Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}


def transformer_config(hf: dict[str, Any], policy: PolicyConfig, layout: Layout) -> TransformerConfig:
    """The configuration of one rank's model chunks.

    Raises ValueError for HF features that this code or Megatron does not have, and for refused overrides.
    """
    check_supported(hf)
    derived = {
        "it follows from the HF config": _architecture(hf),
        "set it through policy.layout": _parallelism(layout),
        "set it through policy.dtype": _precision(policy.dtype),
        "the training step needs it so": _training_step(),
    }
    if not on_gpu():
        derived["the CPU path needs it so"] = _cpu()
    reasons = {name: reason for reason, fields in derived.items() for name in fields} | _REFUSED
    fixed = {name: value for fields in derived.values() for name, value in fields.items()}
    defaults = _gpu(layout) if on_gpu() else {}
    if is_moe(hf):
        defaults |= _moe_defaults()
    overrides = checked_overrides(TransformerConfig, policy.megatron, reasons, "policy.megatron")
    fields = defaults | fixed | overrides
    if fields.get("moe_aux_loss_coeff") and fields.get("moe_router_load_balancing_type", "none") == "none":
        raise ValueError(
            f"policy.megatron.moe_aux_loss_coeff = {fields['moe_aux_loss_coeff']} has no effect while "
            "moe_router_load_balancing_type is none; set policy.megatron.moe_router_load_balancing_type: aux_loss too"
        )
    config = TransformerConfig(**fields)
    stages = config.virtual_pipeline_model_parallel_size or 1
    if stages != layout.vpp:
        raise ValueError(
            f"policy.layout: pipeline_layout {layout.pipeline_layout!r} describes {stages} virtual stages per rank, "
            f"but vpp is {layout.vpp}; make them agree"
        )
    return config


def gpt_arguments(hf: dict[str, Any]) -> dict[str, Any]:
    """GPTModel's own arguments that follow from the HF config."""
    rope = rope_parameters(hf)
    return {
        "max_sequence_length": hf["max_position_embeddings"],
        "share_embeddings_and_output_weights": hf.get("tie_word_embeddings", False),
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "seq_len_interpolation_factor": rope["factor"] if rope["rope_type"] == "linear" else None,
    }


def is_moe(hf: dict[str, Any]) -> bool:
    """Whether the HF config describes a mixture of experts."""
    return bool(hf.get("num_experts") or hf.get("num_local_experts"))


def moe_pattern(hf: dict[str, Any]) -> list[int]:
    """[num_hidden_layers], 1 where the layer is a mixture of experts."""
    sparse = sparse_layers(hf)
    return [int(layer in sparse) for layer in range(hf["num_hidden_layers"])]


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or the same from the `rope_theta` and `rope_scaling` of earlier configs."""
    if hf.get("rope_parameters"):
        return {"rope_type": "default"} | hf["rope_parameters"]
    scaling = hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": hf.get("rope_theta", 10000.0)} | scaling | {"rope_type": kind}


def check_supported(hf: dict[str, Any]) -> None:
    """Raise ValueError for a feature of the HF config that the Megatron model would silently lack."""
    rope = rope_parameters(hf)
    layer_types = set(hf.get("layer_types") or ())
    refusals = {
        "use_sliding_window": (hf.get("use_sliding_window", False), "sliding-window attention is not built"),
        "layer_types": (layer_types - {"full_attention"}, "only full_attention layers are built"),
        "attention_bias": (hf.get("attention_bias", False), "Megatron has a bias on QKV only or on every linear layer"),
        "hidden_act": (hf.get("hidden_act", "silu") != "silu", "only silu (SwiGLU) is built"),
        "attention_dropout": (hf.get("attention_dropout", 0.0), "old and new log-probabilities would differ"),
        "rope_parameters.rope_type": (
            rope["rope_type"] not in ("default", "linear"),
            f"Megatron's GPTModel has no {rope['rope_type']!r} RoPE equal to HF's; only default and linear are built",
        ),
        "rope_parameters.partial_rotary_factor": (
            rope.get("partial_rotary_factor", 1.0) != 1.0,
            "only full rotary embeddings are built",
        ),
        "quantization_config": (hf.get("quantization_config"), "load a checkpoint in high precision"),
    }
    for field, (refused, why) in refusals.items():
        if refused:
            raise ValueError(f"HF config, {field}: {why} (value: {_value(hf, field)!r})")


def _value(hf: dict[str, Any], field: str) -> Any:
    section, _, name = field.rpartition(".")
    return rope_parameters(hf).get(name) if section else hf.get(name)


def _architecture(hf: dict[str, Any]) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }
    if is_moe(hf):
        fields |= {
            "num_moe_experts": num_experts(hf),
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_score_function": "softmax",
            # HF normalises the top-k of a softmax over all experts; that is the softmax over the top-k logits.
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_layer_freq": moe_pattern(hf),
        }
    return fields


def _parallelism(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
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


def _gpu(layout: Layout) -> dict[str, Any]:
    """Fused kernels of Transformer Engine. Apex's fused weight gradient is used where Megatron finds it."""
    from megatron.core.tensor_parallel import layers

    return {
        "gradient_accumulation_fusion": layers._grad_accum_fusion_available,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


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
    "mtp_num_layers": "Megatron would train the MTP heads on every token of the policy's own samples",
    "finalize_model_grads_func": "the training step sets it",
    "grad_scale_func": "the training step sets it",
    "moe_grad_scale_func": "the training step sets it",
    "mtp_grad_scale_func": "the training step sets it",
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
