"""Rotary embeddings with the frequencies that transformers computes, in place of Megatron's own constants."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel

from megatron_gspo.weights.families.rope import Rope


def install_rotary(model: GPTModel, rope: Rope) -> None:
    """Give a freshly built chunk the frequencies of `rope`, and its attention layers YaRN's factor."""
    frequencies, factor = rope.frequencies()
    rotary: Any = model.rotary_pos_emb
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    for module in model.modules():
        if hasattr(module, "_yarn_concentration_factor"):
            module._yarn_concentration_factor = factor  # Megatron reads it from fields that its config does not declare
