"""OLMoE: transformers' numbers on every layout; QK-norm over all heads is what Megatron does not have itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from megatron_gspo.weights.families import family_for
from tests.weights.families.published import config, num_parameters
from tests.weights.models import SHAPE
from tests.weights.parity import Checkpoints, assert_parity, case, write


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    shape = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "pad_token_id": None}
    grouped = {"num_key_value_heads": 2, "tie_word_embeddings": True, "norm_topk_prob": True}
    untied = write(root / "untied", OlmoeForCausalLM(OlmoeConfig(**shape | {"num_key_value_heads": 4})))
    untied[1].save_pretrained(root / "stacked", save_original_format=False)
    return {
        "untied": untied,
        "stacked": (root / "stacked", untied[1]),
        "grouped": write(root / "grouped", OlmoeForCausalLM(OlmoeConfig(**shape | grouped))),
    }


WORLDS = {
    1: [case("untied"), case("stacked"), case("grouped")],
    2: [
        case("untied", tp=2),
        case("grouped", tp=2),
        case("untied", pp=2, vpp=2),
        case("grouped", cp=2),
        case("stacked", ep=2),
        case("untied", etp=2),
    ],
    4: [case("untied", tp=4), case("grouped", tp=4), case("untied", ep=2, etp=2)],  # two ranks share a key head
    8: [case("grouped", tp=2, ep=2, pp=2), case("untied", tp=2, cp=2, pp=2, ep=4)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


def test_published_model():
    assert num_parameters("olmoe-1b-7b") == 6_919_161_856


@pytest.mark.parametrize(
    ("field", "value", "who"),
    [("clip_qkv", 8.0, "Megatron"), ("attention_bias", True, "Megatron"), ("rms_norm_eps", 1e-6, "SGLang")],
)
def test_what_megatron_or_the_server_lacks_is_refused(field: str, value: float, who: str):
    c = config("olmoe-1b-7b") | {field: value}
    with pytest.raises(ValueError, match=f"HF config, {field}: {who}"):
        family_for(c).architecture(c)
