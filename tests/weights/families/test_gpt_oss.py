"""gpt-oss: transformers' numbers on every layout that Megatron has for experts with biases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.load import load_hf
from megatron_gspo.weights.save import save_hf
from tests.ranks import run_ranks
from tests.weights.families.published import config, num_parameters
from tests.weights.models import built
from tests.weights.parity import Checkpoints, assert_parity, case, write

# Windows shorter than every document, activations beyond the clamp, and frequencies that YaRN changes without rounding.
SHAPE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=6,
    swiglu_limit=1.5,
    max_position_embeddings=64,
    initializer_range=0.2,
    pad_token_id=None,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 1.0,
        "beta_slow": 0.01,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
)


def model(**shape: Any) -> GptOssForCausalLM:
    torch.manual_seed(0)
    made = GptOssForCausalLM(GptOssConfig(**{**SHAPE, **shape}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("_bias"):  # [experts, ...], zeros when made
                parameter.normal_(std=0.3)
    return made


def write_mxfp4(directory: Path) -> tuple[Path, GptOssForCausalLM]:
    """As published: experts in codes that were chosen at random, decoded by transformers for its model."""
    made = model(hidden_size=64, intermediate_size=32)
    codes: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = parameter.shape
            blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write(directory, made)
    file, config = directory / "model.safetensors", directory / "config.json"
    kept = {k: v for k, v in load_file(file).items() if f"{k}_blocks" not in codes}
    save_file(kept | codes, file, metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    return directory, made


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("gpt_oss")
    return {
        "plain": write(root / "plain", model()),
        "tied": write(root / "tied", model(tie_word_embeddings=True, vocab_size=130)),
        "layers": write(
            root / "layers",
            model(layer_types=["full_attention", "sliding_attention", "sliding_attention"], num_hidden_layers=3),
            max_shard_size="40KB",
        ),
        "mxfp4": write_mxfp4(root / "mxfp4"),
    }


WORLDS = {
    1: [case("plain"), case("tied"), case("layers"), case("mxfp4")],
    2: [
        case("plain", tp=2),
        case("tied", tp=2),
        case("plain", pp=2),
        case("tied", pp=2, vpp=2),
        case("layers", pp=2, pipeline_layout="Et|ttL"),
        case("plain", ep=2),
        case("mxfp4", ep=2),
        case("plain", cp=2),
    ],
    4: [case("tied", tp=4), case("plain", tp=2, ep=4), case("layers", cp=2, ep=4)],
    8: [case("plain", tp=2, ep=2, pp=2), case("tied", tp=2, cp=2, pp=2, ep=4)],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout(size: int, models: Checkpoints, tmp_path: Path):
    assert_parity(size, WORLDS[size], models, tmp_path)


def export(source: Path, target: Path) -> None:
    with built(source, LayoutConfig(ep=2)) as (made, layout):
        binding = bind(made.chunks, made.hf_config, layout.pgs)
        load_hf(source, binding)
        save_hf(target, plan_export(binding, torch.bfloat16), source)


def test_the_published_form_leaves_as_what_transformers_loads_unquantised(models: Checkpoints, tmp_path: Path):
    source, original = models["mxfp4"]
    run_ranks(2, export, source, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = GptOssForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    for name, tensor in original.state_dict().items():
        # Codes are exact in bf16; the other tensors of this model were fp32.
        assert torch.equal(found[name].to(torch.bfloat16), tensor.to(torch.bfloat16)), name


# gpt-oss-20b and 120b by their model card: 20.91 and 116.83 billion.
@pytest.mark.parametrize(("model", "parameters"), [("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)])
def test_published_models(model: str, parameters: int):
    assert num_parameters(model) == parameters


def test_layers_alternate_where_the_config_does_not_say():
    c = config("gpt-oss-20b")
    expected = family_for(c).architecture(c).transformer
    found = family_for(c).architecture({**c, "layer_types": None}).transformer
    # 128 tokens, the query's own among them; the first layer has a window.
    assert found["window_attn_skip_freq"] == expected["window_attn_skip_freq"] == [1, 0] * 12
    assert found["window_size"] == (127, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": False}, "attention_bias: Megatron has biases"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha: Megatron's quick_gelu has 1\.702 .*1\.0"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types: only full_attention and sliding_attention"),
        ({"sliding_window": None}, "must set sliding_window"),
        ({"rope_scaling": None}, "must set rope_parameters or rope_scaling"),
    ],
)
def test_what_megatron_lacks_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        family_for(config("gpt-oss-20b")).architecture(config("gpt-oss-20b") | change)


def unmarked(directory: Path) -> list[str]:
    """Dense parameters that Megatron takes for whole while they are cut, or the other way round."""
    with built(directory, LayoutConfig(tp=2)) as (made, layout):
        bound = [b for b in bind(made.chunks, made.hf_config, layout.pgs).bound if not b.claim.is_expert]
        return [b.name for b in bound if b.claim.rule.is_cut != getattr(b.parameter, "tensor_model_parallel", False)]


def test_every_shard_counts_in_the_norm_of_the_gradient(models: Checkpoints):
    # Regression: sinks were not marked as cut, and those of the first TP rank alone counted.
    assert run_ranks(2, unmarked, models["plain"][0]) == [[], []]
