"""HF configs to Megatron's; what is refused, and with which words."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

from megatron_gspo.config.schema import Dtype
from megatron_gspo.policy import optimizer as optimizer_module
from megatron_gspo.policy import transformer_config as transformer_config_module
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.overrides import checked_overrides
from megatron_gspo.policy.transformer_config import transformer_config
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.families.family import Architecture
from tests.policy import tiny


def _layout(**sizes: Any) -> Layout:
    """Sizes without process groups: a configuration needs no more."""
    names = ("world", "dp", "tp", "pp", "vpp", "cp", "ep", "etp")
    ranks = ("rank", "dp_rank", "tp_rank", "pp_rank", "cp_rank", "ep_rank", "etp_rank")
    fields = dict.fromkeys(names, 1) | dict.fromkeys(ranks, 0) | {"pipeline_layout": None, "pgs": None}
    return Layout(**(fields | sizes))  # type: ignore[arg-type]


def _config(hf: dict[str, Any], megatron: dict[str, Any] | None = None, dtype=Dtype.fp32, **sizes: Any):
    return transformer_config(_architecture(hf), tiny.policy(megatron, dtype=dtype), _layout(**sizes))


def _architecture(hf: dict[str, Any]) -> Architecture:
    return family_for(hf).architecture(hf)


def test_qwen3_moe_of_transformers():
    hf = Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[2], norm_topk_prob=True).to_dict()
    config = _config(hf, dtype=Dtype.bf16, tp=2, ep=4, cp=2)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (128, 8, 768)
    assert (config.num_query_groups, config.kv_channels, config.ffn_hidden_size) == (4, 64, 6144)
    assert config.moe_layer_freq == [1, 1, 0, 1]
    assert config.moe_router_pre_softmax is False
    assert (config.sequence_parallel, config.expert_tensor_parallel_size) == (True, 1)
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
    # HF's router_aux_loss_coef is 0.001: a matter of pre-training, not of RL.
    assert (config.moe_aux_loss_coeff, config.moe_router_load_balancing_type) == (0.0, "none")


def test_gpt_oss_of_transformers():
    hf = GptOssConfig(num_hidden_layers=2).to_dict()
    config = _config(hf, tp=2, cp=4, ep=8)
    assert (config.softmax_type, config.window_size, config.window_attn_skip_freq) == ("learnable", (127, 0), [1, 0])
    assert (config.add_bias_linear, config.glu_linear_offset, config.activation_func_clamp_value) == (True, 1.0, 7.0)
    assert config.activation_func is quick_gelu
    with pytest.raises(ValueError, match=r"policy\.layout\.etp = 2: .* biases at etp 1 only"):
        _config(hf, etp=2)
    # On a GPU, ranks of CP exchange heads: Transformer Engine has sinks and windows no other way. 8 key/value heads.
    on_gpu = transformer_config_module._gpu(_architecture(hf), _layout(tp=2, cp=4))
    assert (on_gpu["cp_comm_type"], on_gpu["bias_dropout_fusion"]) == ("a2a", False)
    with pytest.raises(ValueError, match=r"policy\.layout\.cp = 8: .* 4 heads .* tp 2 ranks has of num_query_groups 8"):
        transformer_config_module._gpu(_architecture(hf), _layout(tp=2, cp=8))


def test_qwen3_of_transformers():
    hf = Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}).to_dict()
    config = _config(hf)
    assert (config.num_moe_experts, config.kv_channels, config.qk_layernorm) == (None, 128, True)
    architecture = _architecture(hf)
    assert architecture.rope.parameters["rope_theta"] == 1e6 and architecture.tied


def test_sparse_step_counts_from_one():
    # HF: (layer + 1) % decoder_sparse_step == 0
    sparse = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": []}
    assert _architecture(tiny.hf_config(**sparse)).sparse_layers == (1, 3)
    mixed = {"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}
    assert _architecture(tiny.hf_config(**mixed)).sparse_layers == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window: SGLang would sample without windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: only full_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, r"hidden_act: only silu .*'gelu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout: .*0\.1"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}}, "rope_type: 'dynamic'"),
    ],
)
def test_unsupported_hf_features_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        _config(tiny.hf_config(**change))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("moe_z_los_coeff", 0.1, "no such field; did you mean 'moe_z_loss_coeff'"),
        ("hidden_size", 64, "it follows from the HF config"),
        ("expert_model_parallel_size", 2, r"set it through policy\.layout"),
        ("bf16", True, r"set it through policy\.dtype"),
        ("calculate_per_token_loss", False, "the training step needs it so"),
        # gloo mixes up batched messages under PP x VPP: the loss would be wrong in silence.
        ("batch_p2p_comm", True, "the CPU path needs it so"),
        ("grad_scale_func", None, "the training step sets it"),
        ("recompute_granularity", 1, r"expected one of \['full', 'selective'\] \| null, got 1"),
        ("moe_router_topk_scaling_factor", "high", r"expected float \| null, got 'high'"),
        ("qk_clip", "yes", "expected bool, got 'yes'"),
    ],
)
def test_refused_overrides_name_the_key_and_the_reason(field, value, message):
    with pytest.raises(ValueError, match=rf"policy\.megatron\.{field}: .*{message}"):
        _config(tiny.hf_config(), {field: value})


def test_free_fields_are_applied_and_names_resolved():
    config = _config(
        tiny.hf_config(), {"moe_z_loss_coeff": 1, "attention_backend": "flash", "recompute_modules": ["moe"]}
    )
    assert config.moe_z_loss_coeff == 1.0 and isinstance(config.moe_z_loss_coeff, float)
    assert config.attention_backend is AttnBackend.flash
    assert config.recompute_modules == ["moe"]
    optimizer = checked_overrides(OptimizerConfig, {"exp_avg_dtype": "bfloat16"}, {}, "k")
    assert optimizer == {"exp_avg_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=r"k\.exp_avg_dtype: expected dtype, got 'bf17'"):
        checked_overrides(OptimizerConfig, {"exp_avg_dtype": "bf17"}, {}, "k")
    assert checked_overrides(DistributedDataParallelConfig, {"bucket_size": 7}, {}, "k") == {"bucket_size": 7}
    with pytest.raises(ValueError, match=r"k\.activation_func"):
        checked_overrides(TransformerConfig, {"activation_func": "relu"}, {}, "k")


def test_pipeline_layout_must_agree_with_vpp():
    with pytest.raises(ValueError, match=r"'Et\|t\|t\|tL' describes 2 virtual stages per rank, but vpp is 1"):
        _config(tiny.hf_config(), pp=2, pipeline_layout="Et|t|t|tL")


def test_every_name_in_our_tables_is_a_field():
    # The GPU table is not used on a CPU, and a misspelt refusal would refuse nothing.
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert transformer_config_module._gpu(_architecture(tiny.hf_config()), _layout()).keys() <= fields
    assert transformer_config_module._REFUSED.keys() <= fields
    assert optimizer_module._DERIVED.keys() <= {field.name for field in dataclasses.fields(OptimizerConfig)}
