"""A random Qwen3-MoE of 0.3 M parameters, as a checkpoint on disk and as transformers' own model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 320


def make_policy(seed: int) -> PreTrainedModel:
    """float32, on CPU. Weights are large, so that log-probabilities differ much between tokens and between seeds."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
    )
    return Qwen3MoeForCausalLM(config).eval()


def save_policy(model: PreTrainedModel, directory: Path) -> Path:
    """Write an HF checkpoint without a tokenizer; returns `directory`."""
    model.save_pretrained(directory)
    return directory


def hf_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint under their names there; in memory, transformers fuses the experts."""
    with tempfile.TemporaryDirectory() as folder:
        return load_file(save_policy(model, Path(folder)) / "model.safetensors")


@torch.no_grad()
def hf_logprobs(model: PreTrainedModel, prompt: Sequence[int], output: Tensor, temperature: float = 1.0) -> Tensor:
    """[t] float32: transformers' log-probability of each of the t output tokens."""
    tokens = torch.cat([torch.tensor(prompt), output])
    logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, output[:, None])[:, 0]
