"""Tiny random HF checkpoints, written by transformers itself, and Megatron models on a layout to hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_gspo.config.schema import Dtype, LayoutConfig, OptimizerSection, PolicyConfig

SHAPE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)


def write_checkpoint(
    directory: Path, *, moe: bool, save: dict[str, Any] | None = None, **shape: Any
) -> PreTrainedModel:
    """Saves a random model with norms and biases far from their initial 1 and 0; returns it."""
    torch.manual_seed(0)
    if moe:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **EXPERTS, **shape}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **shape}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory, **(save or {}))
    return model.eval()


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def policy_config(directory: Path, layout: LayoutConfig, dtype: Dtype = Dtype.fp32) -> PolicyConfig:
    return PolicyConfig(hf=str(directory), dtype=dtype, layout=layout, optimizer=OptimizerSection(lr=1e-3))


@contextmanager
def built(directory: Path, layout_config: LayoutConfig, dtype: Dtype = Dtype.fp32) -> Iterator[tuple[Any, Any]]:
    """(model, layout) with random parameters on this rank; the process groups end with the block."""
    from megatron.core import parallel_state

    from megatron_gspo.policy.layout import init_layout
    from megatron_gspo.policy.model import build_model

    layout = init_layout(layout_config)
    try:
        yield build_model(read_config(directory), policy_config(directory, layout_config, dtype), layout), layout
    finally:
        parallel_state.destroy_model_parallel()
