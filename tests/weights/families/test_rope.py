"""Frequencies of configs old and new against transformers' own rotary modules."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_gspo.weights.families.decoder import rope

SIZES = dict(hidden_size=256, num_attention_heads=4, max_position_embeddings=32768)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048)
YARN = dict(factor=16.0, original_max_position_embeddings=2048, beta_fast=24.0, truncate=False)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        ),
        (
            {"rope_theta": 1e6, "rope_parameters": {"type": "yarn", **YARN}},
            {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        ),
    ],
)
def test_both_spellings_give_transformers_frequencies(older, newer):
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=newer))
    for spelling in (older, {"rope_parameters": newer}):
        frequencies, factor = rope({**SIZES, **spelling}).frequencies()
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-7, atol=0)
        assert factor == theirs.attention_scaling


def test_a_part_of_the_head_turns():
    frequencies, _ = rope({**SIZES, "rope_theta": 1e4, "partial_rotary_factor": 0.5}).frequencies()
    assert len(frequencies) == 64 * 0.5 / 2


def test_the_factor_of_yarn_is_what_the_server_makes_of_it():
    """DeepSeek-R1-0528-Qwen3-8B: 0.1 ln 4 + 1, which attn_factor takes back; transformers has 1.14."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    c = {**SIZES, "rope_theta": 1e6, "rope_scaling": {**scaling, "attn_factor": 0.8782488562869419}}
    assert rope(c).frequencies()[1] == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(ValueError, match="SGLang would sample without attention_factor"):
        rope({**SIZES, "rope_theta": 1e6, "rope_scaling": {**scaling, "attention_factor": 1.0}})
