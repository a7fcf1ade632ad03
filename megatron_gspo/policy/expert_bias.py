"""The routers' expert bias: fp32 and as the checkpoint has it, in every model, for sampling and training must route
alike.

Megatron keeps it as a buffer. DDP and the optimizer leave it alone; two others do not, and are held off here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


def freeze_expert_bias(model: torch.nn.Module) -> None:
    """Keep finalize_model_grads from moving the bias of freshly built routers.

    Nor do they count tokens for it: with a padding mask, Megatron-Core 0.19.2 would combine [tokens, experts] and
    [tokens] without a dimension between them (`TopKRouter._apply_expert_bias`), and fail.
    """
    for router in _routers(model):
        router.frozen_expert_bias = True
        router.enable_expert_bias = False


def half_precision(config: TransformerConfig, model: torch.nn.Module) -> Float16Module:
    """`model` in Float16Module, which would round the bias with all else: routers turn it back to fp32 at their first
    forward pass, rounded."""
    biases = [(router, router.expert_bias) for router in _routers(model)]
    wrapped = Float16Module(config, model)
    for router, bias in biases:
        router.expert_bias = bias
    return wrapped


def _routers(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, TopKRouter))
