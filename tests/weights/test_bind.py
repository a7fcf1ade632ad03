"""Every parameter and every HF tensor is claimed exactly once, or the error names it. One real rank for all cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights import families
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.claims import claims_of
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.families.blocks import attention
from megatron_gspo.weights.rules import Copy, HFTensor
from tests.ranks import run_ranks
from tests.weights.models import EXPERTS, SHAPE, built, write_checkpoint

LAYER = "decoder.layers.{layer}."


def attempt(step: Callable[[], object]) -> str:
    try:
        step()
    except ValueError as error:
        return str(error)
    return "no error"


def with_rules(edit: Callable[[list], list]) -> None:
    """Edits the family's rules in this process (a fork that ends with the test)."""
    family = families.qwen3_moe.FAMILY
    families.FAMILIES["qwen3_moe"] = replace(family, rules=lambda c: edit(family.rules(c)))


def provoke(directory: Path) -> dict[str, str]:
    """Messages of bind by what is wrong."""
    with built(directory, LayoutConfig()) as (model, layout):

        def message(**changed) -> str:
            return attempt(lambda: bind(model.chunks, {**model.hf_config, **changed}, layout.pgs))

        found = {
            "nothing": message(),
            "fewer layers": message(num_hidden_layers=3),
            "dense layer": message(mlp_only_layers=[2]),
            "wide": message(moe_intermediate_size=40),
            "vocabulary": message(vocab_size=200),
        }
        biases = attention(model.hf_config, range(4), qkv_bias=True, output_bias=True)[2:]
        with_rules(lambda rules: [*rules, *biases])
        found["bias"] = message()
        with_rules(lambda rules: [r for r in rules if "q_layernorm" not in r.megatron[0]])
        found["hole"] = message()
        again = Copy(
            hf=(HFTensor("model.layers.{layer}.mlp.gate2.weight", (4, 32)),),
            megatron=(LAYER + "mlp.router.weight",),
            layers=(1,),
        )
        with_rules(lambda rules: [*rules, again])
        found["two rules"] = message()
        norm = Copy(hf=(HFTensor("model.norm.weight", (32,)),), megatron=("decoder.other.weight",))
        with_rules(lambda rules: [*rules, norm])
        found["two claims"] = message()
    return found


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("hf")
    write_checkpoint(directory, moe=True, tie_word_embeddings=False)
    return run_ranks(1, provoke, directory)[0]


EXPECTED = {
    "nothing": ["no error"],
    "hole": ["no rule claims", "decoder.layers.0.self_attention.q_layernorm.weight", "decoder.layers.3."],
    "two rules": ["several rules claim", "decoder.layers.1.mlp.router.weight"],
    "two claims": ["HF tensors that more than one rule claims: model.norm.weight"],
    "fewer layers": ["no rule claims", "decoder.layers.3.input_layernorm.weight"],
    "dense layer": ["no rule claims", "decoder.layers.2.mlp.router.weight"],
    "bias": ["no Megatron parameter", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.o_proj.bias"],
    "wide": [
        "decoder.layers.0.mlp.experts.linear_fc1.weight0 is [48, 32], expected [80, 32]",
        "gate_proj.weight [40, 32]",
    ],
    "vocabulary": ["embedding.word_embeddings.weight is [128, 32], expected [200, 32]"],
}


@pytest.mark.parametrize("wrong", EXPECTED)
def test_what_is_wrong_is_named(wrong: str, messages: dict[str, str]):
    for part in EXPECTED[wrong]:
        assert part in messages[wrong]


def test_unsupported_family_names_the_supported_ones():
    with pytest.raises(ValueError, match=r"'bert' is not supported; supported are .*qwen3, qwen3_moe"):
        family_for({"model_type": "bert"})


def test_a_missing_config_field_is_named():
    with pytest.raises(ValueError, match=r"config\.json of a qwen3 model must set head_dim"):
        family_for({"model_type": "qwen3"}).architecture({**SHAPE, "model_type": "qwen3", "head_dim": None})


def test_mixed_layers_are_chosen_as_transformers_chooses_them():
    config = {**SHAPE, **EXPERTS, "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    names = {t.name for claim in claims_of(family_for(config).rules(config)) for t in claim.hf}
    assert {int(name.split(".")[2]) for name in names if "experts" in name} == {1}
    assert {int(name.split(".")[2]) for name in names if name.endswith("mlp.up_proj.weight")} == {0, 2, 3}


def other_spec(directory: Path) -> list[str]:
    """Renames norms as Transformer Engine's spec does, experts as SequentialMLP; the names bound in layers 2 and 3."""
    with built(directory, LayoutConfig()) as (model, layout):
        for layer in model.chunks[0].decoder.layers:
            layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
            layer.input_layernorm = torch.nn.Identity()
        dense, sparse = model.chunks[0].decoder.layers[2:4]
        dense.mlp.linear_fc1.layer_norm_weight = dense.pre_mlp_layernorm.weight
        dense.pre_mlp_layernorm = torch.nn.Identity()
        sparse.mlp.experts = one_by_one(sparse.mlp.experts)
        return [b.name for b in bind(model.chunks, model.hf_config, layout.pgs).bound if b.claim.layer in (2, 3)]


def one_by_one(grouped: torch.nn.Module) -> torch.nn.Module:
    """The grouped experts as SequentialMLP holds them: one module with two linears per expert."""
    sequential = torch.nn.Module()
    sequential.local_experts = torch.nn.ModuleList()
    for number in range(EXPERTS["num_experts"]):
        expert = torch.nn.Module()
        for linear in ("linear_fc1", "linear_fc2"):
            holder = torch.nn.Module()
            holder.weight = getattr(getattr(grouped, linear), f"weight{number}")
            expert.add_module(linear, holder)
        sequential.local_experts.append(expert)
    return sequential


def test_the_spellings_of_other_layer_specs(tmp_path: Path):
    write_checkpoint(tmp_path, moe=True, mlp_only_layers=[2])
    names = run_ranks(1, other_spec, tmp_path)[0]
    block = "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"
    assert block.format(2) in names and block.format(3) in names
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight" in names
