"""DeepSeek-V3 and Kimi-K2: transformers' numbers on every layout, and the sizes of the published models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.families import family_for
from tests.ranks import run_ranks
from tests.weights.families.published import assert_tensors_of, config, num_parameters
from tests.weights.models import built
from tests.weights.parity import Checkpoints, assert_parity, case, write

# Frequencies that YaRN changes, values narrower than keys, and groups of experts that not every token may use.
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    beta_fast=4.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=16,
)
SHAPE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=2,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    max_position_embeddings=64,
    initializer_range=0.2,
    rope_parameters=YARN,
    num_mtp_layers=0,
    pad_token_id=None,
)
PLAIN = dict(
    q_lora_rank=None,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-3,  # far from that of the latents' norms
    rope_parameters=dict(rope_type="default", rope_theta=50000.0),
)


def model(**shape: Any) -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    made = DeepseekV3ForCausalLM(DeepseekV3Config(**{**SHAPE, **shape}))
    for name, bias in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.3)
    return made


def rename(directory: Path, model_type: str) -> None:
    """A checkpoint of a type that transformers knows by its remote code alone."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("deepseek_v3")
    kimi = write(
        root / "kimi", model(n_group=1, topk_group=1, n_routed_experts=12, num_attention_heads=2, num_key_value_heads=2)
    )
    rename(root / "kimi", "kimi_k2")
    return {
        "kimi": kimi,
        "v3": write(root / "v3", model()),
        "plain": write(root / "plain", model(**PLAIN)),
        "tied": write(
            root / "tied",
            model(tie_word_embeddings=True, vocab_size=130, rope_parameters={**YARN, "mscale_all_dim": 0.707}),
        ),
    }


WORLDS = {
    1: [case("v3"), case("plain"), case("tied"), case("kimi")],
    2: [
        case("v3", tp=2),
        case("plain", tp=2),
        case("v3", pp=2),
        case("tied", pp=2, vpp=2),
        case("v3", cp=2),
        case("v3", ep=2),
        case("plain", etp=2),
        case("kimi", tp=2, ep=2),
    ],
    4: [case("v3", tp=4), case("tied", ep=2, etp=2), case("plain", tp=2, cp=2, ep=4)],
    8: [case("v3", tp=2, ep=2, pp=2)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


PUBLISHED = {"deepseek-v3": 671_026_419_200, "kimi-k2": 1_026_408_232_448, "moonlight-16b-a3b": 15_960_110_208}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str):
    assert num_parameters(name) == PUBLISHED[name]
    assert_tensors_of(name, DeepseekV3ForCausalLM)


def test_tensors_of_further_layers_are_carried():
    (pattern,) = family_for(config("deepseek-v3")).carried(config("deepseek-v3"))
    assert re.fullmatch(pattern, "model.layers.61.eh_proj.weight")
    assert not re.fullmatch(pattern, "model.layers.6.mlp.up_proj.weight")
    for none in (config("kimi-k2"), config("deepseek-v3") | {"num_nextn_predict_layers": None}):
        assert family_for(none).carried(none) == ()


def test_groups_of_experts_are_those_of_transformers_where_the_config_does_not_say():
    c = {key: value for key, value in config("deepseek-v3").items() if key not in ("n_group", "topk_group")}
    assert family_for(c).architecture(c) == family_for(c).architecture(config("deepseek-v3"))


REFUSED = {
    "scoring_func": {"scoring_func": "softmax"},
    "topk_method": {"topk_method": "group_limited_greedy"},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "norm_topk_prob": {"norm_topk_prob": False},
    "topk_group": {"topk_group": 2},
    "attention_bias": {"attention_bias": True},
    "rope_interleave": {"rope_interleave": False},
    "num_key_value_heads": {"num_key_value_heads": 8},
    "v_head_dim": {"v_head_dim": 256},
    "rope_parameters": {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_megatron_lacks_is_refused(field: str):
    c = config("deepseek-v3") | REFUSED[field]
    with pytest.raises(ValueError, match=f"HF config, {field}: "):
        family_for(c).architecture(c)


def angles(directory: Path) -> tuple[torch.Tensor, float, float]:
    """Angles of Megatron's own rotary embedding [positions, width / 2], its factor, and the scale of the softmax."""
    with built(directory, LayoutConfig()) as (model, _):
        attention = model.chunks[0].decoder.layers[0].self_attention
        embedding, factor = attention.rotary_pos_emb(POSITIONS, packed_seq=True)
        return embedding[:, 0, 0, : embedding.shape[-1] // 2].numpy(), factor, attention.core_attention.scale


POSITIONS = 100_000
SCALED = {
    "both": YARN | dict(factor=40.0, mscale=0.8, mscale_all_dim=1.3, original_max_position_embeddings=4096),
    "neither": {k: v for k, v in YARN.items() if "mscale" not in k} | dict(factor=40.0),
    "one": {k: v for k, v in YARN.items() if k != "mscale_all_dim"} | dict(factor=40.0, mscale=0.8),
    "kimi": YARN | dict(factor=32.0, rope_theta=50000.0, beta_fast=1.0, original_max_position_embeddings=4096),
}


@pytest.mark.parametrize("name", SCALED)
def test_positions_far_out_turn_as_transformers_turns_them(name: str, tmp_path: Path):
    """Megatron computes frequencies itself. fp32: an angle of 1e5 radians is exact to 8e-3 at most."""
    made = model(num_hidden_layers=1, first_k_dense_replace=1, qk_rope_head_dim=64, rope_parameters=SCALED[name])
    made.save_pretrained(tmp_path)
    ours, factor, scale = run_ranks(1, angles, tmp_path)[0]
    theirs = made.model.rotary_emb
    expected = torch.arange(POSITIONS)[:, None].float() * theirs.inv_freq
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=3e-7, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert scale == pytest.approx(made.model.layers[0].self_attn.scaling, rel=1e-12)


def other_spec(directory: Path) -> list[str]:
    """Moves the norms to where Transformer Engine's spec fuses them; the names bound in layer 1."""
    with built(directory, LayoutConfig()) as (model, layout):
        for layer in model.chunks[0].decoder.layers:
            attention = layer.self_attention
            for kind in ("q", "kv"):
                norm = getattr(attention, f"{kind}_layernorm")
                getattr(attention, f"linear_{kind}_up_proj").layer_norm_weight = norm.weight
                setattr(attention, f"{kind}_layernorm", torch.nn.Identity())
        return [b.name for b in bind(model.chunks, model.hf_config, layout.pgs).bound if b.claim.layer == 1]


def test_the_spellings_of_transformer_engine(models: Checkpoints):
    names = run_ranks(1, other_spec, models["v3"][0])[0]
    attention = "decoder.layers.1.self_attention.linear_"
    assert {f"{attention}q_up_proj.layer_norm_weight", f"{attention}kv_up_proj.layer_norm_weight"} <= set(names)
