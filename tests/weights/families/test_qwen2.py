"""Qwen2 and Qwen2.5: transformers' numbers on every layout, and the sizes of the published models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_gspo.weights.families import family_for
from tests.weights.families.published import config, num_parameters
from tests.weights.models import SHAPE
from tests.weights.parity import Checkpoints, assert_parity, case, write


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    shape = {**SHAPE, "head_dim": 8}
    return {
        "untied": write(root / "untied", Qwen2ForCausalLM(Qwen2Config(**shape))),
        "tied": write(root / "tied", Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))),
    }


WORLDS = {
    1: [case("untied"), case("tied")],
    2: [case("untied", tp=2), case("untied", pp=2, vpp=2), case("tied", pp=2), case("untied", cp=2)],
    4: [case("untied", tp=4), case("tied", tp=2, pp=2), case("tied", tp=2, cp=2)],  # tp 4: a part of a key head a rank
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


@pytest.mark.parametrize(("model", "parameters"), [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512)])
def test_published_models(model: str, parameters: int):
    assert num_parameters(model) == parameters


def test_windows_are_refused():
    c = config("qwen2.5-7b") | {"use_sliding_window": True}
    with pytest.raises(ValueError, match="HF config, use_sliding_window: SGLang would sample without windows"):
        family_for(c).architecture(c)


def test_attention_in_chunks_is_refused():
    c = config("qwen2.5-7b") | {"dual_chunk_attention_config": {"chunk_size": 262144}}
    with pytest.raises(ValueError, match="dual_chunk_attention_config: SGLang would attend in chunks"):
        family_for(c).architecture(c)
