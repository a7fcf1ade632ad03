"""Tiny policies in shapes that the GPU's kernels take, built on one rank as the trainer builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_gspo.config import Dtype, LayoutConfig
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import build_model, ddp_config, wrap
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import ExportPlan, buckets, gather, plan_export
from megatron_gspo.weights.load import load_hf
from tests.weights.models import policy_config, read_config

SHAPE: dict[str, Any] = dict(
    vocab_size=200,  # padded to 256 on a GPU
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    initializer_range=0.08,
    tie_word_embeddings=False,
)
DENSE: dict[str, Any] = dict(moe=False, **{k: v for k, v in SHAPE.items() if not k.startswith("moe")})
# The second layer is dense: both spellings of the norm before the MLP occur.
MOE: dict[str, Any] = dict(moe=True, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1], **SHAPE)
# Every expert takes every token: in bf16 a token between two experts would else be off by far more than rounding.
ALL_EXPERTS: dict[str, Any] = MOE | dict(num_experts=4, num_experts_per_tok=4)


def build_policy(directory: Path, dtype: Dtype) -> tuple[Stepper, ExportPlan, Layout]:
    """The policy of an HF checkpoint in Megatron's wrappers, at temperature 1. Inside `one_rank`."""
    layout = init_layout(LayoutConfig())
    config = policy_config(directory, LayoutConfig(), dtype)
    model = build_model(read_config(directory), config, layout)
    binding = bind(model.chunks, model.hf_config, layout.pgs)
    load_hf(directory, binding)
    return Stepper(model, wrap(model, ddp_config(config), layout), layout, 1.0), plan_export(binding), layout


def exported(plan: ExportPlan) -> dict[str, Tensor]:
    """Every HF tensor of the policy, on the CPU; in buckets of 64 KiB, so that there are several."""
    return {name: tensor.cpu() for bucket in buckets(plan, 1 << 16) for name, tensor in gather(bucket)}
