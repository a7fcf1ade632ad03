"""Qwen3, dense and with experts: transformers' numbers on every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from megatron_gspo.weights.families import FAMILIES, qwen3
from megatron_gspo.weights.rules import Copy
from tests.weights.families.published import assert_tensors_of, num_parameters
from tests.weights.models import write_checkpoint
from tests.weights.parity import Checkpoints, assert_parity, case


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("hf")
    specs: dict[str, dict[str, Any]] = {
        "dense": dict(moe=False, tie_word_embeddings=False, head_dim=16),  # more than hidden_size / heads
        "dense_tied": dict(moe=False, tie_word_embeddings=True, vocab_size=130),
        "moe": dict(moe=True, tie_word_embeddings=False),
        "moe_tied": dict(moe=True, tie_word_embeddings=True),
        "moe_mixed": dict(moe=True, mlp_only_layers=[1], num_hidden_layers=5, norm_topk_prob=False),
        "moe_sharded": dict(
            moe=True, tie_word_embeddings=False, decoder_sparse_step=2, save={"max_shard_size": "40KB"}
        ),
        "moe_stacked": dict(moe=True, tie_word_embeddings=False, save={"save_original_format": False}),
    }
    written = {name: (root / name, write_checkpoint(root / name, **spec)) for name, spec in specs.items()}
    assert len(list((root / "moe_sharded").glob("*.safetensors"))) > 1
    return written


WORLDS = {
    1: [case(name) for name in ("dense", "dense_tied", "moe", "moe_tied", "moe_mixed", "moe_sharded", "moe_stacked")],
    2: [
        case("dense", tp=2),
        case("dense_tied", tp=2),
        case("dense_tied", pp=2),
        case("moe", tp=2),
        case("moe", pp=2),
        case("moe", pp=2, vpp=2),
        case("moe_tied", pp=2, vpp=2),
        case("moe_mixed", pp=2, pipeline_layout="Ett|tttL"),
        case("moe", ep=2),
        case("moe_stacked", ep=2),
        case("moe", etp=2),
        case("moe_stacked", etp=2),
        case("moe", cp=2),
        case("dense", cp=2),
    ],
    4: [
        case("dense_tied", tp=4),  # 130 rows padded to 132, and more ranks than key/value heads
        case("moe", ep=2, etp=2),
        case("moe_sharded", tp=2, cp=2, ep=4),
        case("moe_mixed", pp=2, vpp=2, tp=2, ep=2, pipeline_layout="Et|t|tt|tL"),
    ],
    8: [
        case("moe", tp=2, ep=2, pp=2),
        case("moe_tied", tp=2, ep=2, pp=2, etp=2),
        case("moe_tied", tp=2, cp=2, pp=2, ep=4),
    ],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


def test_swapped_norms_of_queries_and_keys_show(models: Checkpoints, tmp_path: Path, monkeypatch):
    def swapped(c):
        for rule in rules(c):
            (name, *_), other = rule.megatron, {"q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}
            block, _, norm = name.rpartition("self_attention.")
            kind = norm.removesuffix(".weight")
            if isinstance(rule, Copy) and kind in other:
                rule = replace(rule, megatron=(f"{block}self_attention.{other[kind]}.weight",))
            yield rule

    rules = qwen3.FAMILY.rules
    monkeypatch.setitem(FAMILIES, "qwen3", replace(qwen3.FAMILY, rules=lambda c: list(swapped(c))))
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(1, [case("dense")], models, tmp_path)


def test_published_models():
    assert num_parameters("deepseek-r1-0528-qwen3-8b") == 8_190_735_360
    assert num_parameters("qwen3-30b-a3b") == 30_532_122_624
    assert_tensors_of("deepseek-r1-0528-qwen3-8b", Qwen3ForCausalLM)
