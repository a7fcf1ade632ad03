"""Llama 2 and 3: transformers' numbers on every layout, the sizes of the published models, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_gspo.weights.families import family_for
from tests.weights.families.published import config, num_parameters
from tests.weights.models import SHAPE
from tests.weights.parity import Checkpoints, assert_parity, case, write

# Stretches frequencies of a head of 8 in all three ways: kept, divided by the factor, and in between.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    llama2 = LlamaConfig(**SHAPE | {"num_key_value_heads": 4, "head_dim": 12})  # no hidden_size / heads
    llama31 = LlamaConfig(**SHAPE | {"rope_parameters": LLAMA3})
    llama32 = LlamaConfig(**SHAPE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True})
    return {
        "llama2": write(root / "llama2", LlamaForCausalLM(llama2)),
        "llama31": write(root / "llama31", LlamaForCausalLM(llama31)),
        "llama32": write(root / "llama32", LlamaForCausalLM(llama32)),
    }


WORLDS = {
    1: [case("llama2"), case("llama31"), case("llama32")],
    2: [case("llama31", tp=2), case("llama31", pp=2, vpp=2), case("llama32", pp=2), case("llama31", cp=2)],
    4: [case("llama2", tp=4), case("llama32", tp=2, pp=2), case("llama32", tp=2, cp=2)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


@pytest.mark.parametrize(("model", "parameters"), [("llama-3.1-8b", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400)])
def test_published_models(model: str, parameters: int):
    assert num_parameters(model) == parameters


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_biases_are_refused(field: str):
    c = config("llama-3.1-8b") | {field: True}
    with pytest.raises(ValueError, match=f"HF config, {field}: Megatron has biases"):
        family_for(c).architecture(c)


def test_dynamic_frequencies_are_refused():
    c = config("llama-3.1-8b") | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(ValueError, match=r"rope_parameters\.rope_type: 'dynamic' is not built"):
        family_for(c).architecture(c)
