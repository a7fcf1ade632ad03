"""A tiny random Qwen3-MoE checkpoint for tests of the loop."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny_checkpoint(path: Path, seed: int = 1) -> Path:
    """Write it to `path`: 4 layers, hidden 64, 8 experts, vocabulary 96."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path
