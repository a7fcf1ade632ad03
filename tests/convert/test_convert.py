"""Conversion both ways against Megatron's own loading and saving, on every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_gspo.config.schema import Dtype, LayoutConfig
from megatron_gspo.convert.to_hf import megatron_to_hf
from megatron_gspo.convert.to_megatron import hf_to_megatron
from megatron_gspo.weights.quantize import dequantize
from megatron_gspo.weights.source import HFCheckpoint
from tests.convert.folders import differences, load_by_megatron, save_by_megatron, tensors
from tests.ranks import run_ranks
from tests.weights.families import test_deepseek_v3, test_gpt_oss
from tests.weights.models import read_config, write_checkpoint
from tests.weights.parity import write

PAIRS = [LayoutConfig(tp=2), LayoutConfig(pp=2, vpp=2)]
EXPERTS = {1: [LayoutConfig()], 2: [*PAIRS, LayoutConfig(ep=2)], 8: [LayoutConfig(tp=2, ep=2, pp=2)]}
LAYOUTS = {
    "moe": {**EXPERTS, 2: [*EXPERTS[2], LayoutConfig(etp=2)]},
    "tied": {1: [LayoutConfig()], 2: PAIRS, 4: [LayoutConfig(tp=2, pp=2)]},
    "deepseek": {**EXPERTS, 2: [*EXPERTS[2], LayoutConfig(etp=2)]},
    "gpt_oss": EXPERTS,  # Megatron's experts have biases at etp 1 only
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """HF checkpoints by name; odd vocabularies, so that TP pads them."""
    root = tmp_path_factory.mktemp("hf")
    write_checkpoint(root / "moe", moe=True, tie_word_embeddings=False, mlp_only_layers=[1], vocab_size=129)
    write_checkpoint(root / "tied", moe=False, tie_word_embeddings=True, vocab_size=131)
    write(root / "deepseek", test_deepseek_v3.model())
    write(root / "gpt_oss", test_gpt_oss.model())
    (root / "moe" / "tokenizer.json").write_text("{}")
    return {name: root / name for name in LAYOUTS}


def there(source: Path, target: Path, dtype: str = "keep") -> int:
    return hf_to_megatron(source, target, dtype=dtype)


def back(source: Path, target: Path, hf: Path | None = None, dtype: str = "keep") -> int:
    return megatron_to_hf(source, target, hf=hf, dtype=dtype, shard_bytes=50_000)


def load_each(hf: Path, megatron: Path, layouts: list[LayoutConfig]) -> list[tuple[int, list[str]]]:
    return [load_by_megatron(hf, megatron, layout, Dtype.fp32) for layout in layouts]


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_loads_it_in_any_layout_and_it_comes_back_bit_for_bit(checkpoints, tmp_path: Path, name: str):
    hf, megatron = checkpoints[name], tmp_path / "megatron"
    sizes = run_ranks(2 if name == "moe" else 1, there, hf, megatron)
    assert sizes[0] == sum(value.nbytes for value in tensors(hf).values())
    for world, layouts in LAYOUTS[name].items():
        for results in run_ranks(world, load_each, hf, megatron, layouts):
            for layout, (count, different) in zip(layouts, results, strict=True):
                assert count > 4 and different == [], layout
    run_ranks(2 if name == "moe" else 1, back, megatron, tmp_path / "back")
    assert differences(tensors(hf), tensors(tmp_path / "back")) == []
    assert read_config(tmp_path / "back") == read_config(hf)
    assert (tmp_path / "back" / "tokenizer.json").exists() == (name == "moe")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron"]


def save_each(hf: Path, root: Path, layouts: list[LayoutConfig]) -> None:
    for number, layout in enumerate(layouts):
        save_by_megatron(hf, root / f"{layout.tp}{layout.pp}{layout.ep}{layout.etp}{number}", layout)


def back_each(root: Path, hf: Path) -> None:
    for folder in sorted(root.iterdir()):
        back(folder, root / f"hf{folder.name}", hf)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_megatron_saved_on_any_layout_comes_out_bit_for_bit(checkpoints, tmp_path: Path, name: str):
    hf = checkpoints[name]
    for world, layouts in LAYOUTS[name].items():
        run_ranks(world, save_each, hf, tmp_path, layouts)
    run_ranks(1, back_each, tmp_path, hf)
    found = sorted(tmp_path.glob("hf*"))
    assert len(found) == sum(map(len, LAYOUTS[name].values()))
    for folder in found:
        assert differences(tensors(hf), tensors(folder)) == [], folder.name


def test_dtypes(checkpoints, tmp_path: Path):
    hf, megatron = checkpoints["deepseek"], tmp_path / "megatron"
    original = tensors(hf)
    run_ranks(1, there, hf, megatron, "bf16")
    run_ranks(1, back, megatron, tmp_path / "kept")
    kept = tensors(tmp_path / "kept")
    for name, value in original.items():
        wanted = value if name.endswith("e_score_correction_bias") else value.bfloat16()
        assert torch.equal(kept[name], wanted) and kept[name].dtype == wanted.dtype, name
    assert read_config(tmp_path / "kept")["dtype"] == "bfloat16"
    run_ranks(1, back, megatron, tmp_path / "fp32", None, "fp32")
    assert {value.dtype for value in tensors(tmp_path / "fp32").values()} == {torch.float32}
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", output_loading_info=True)
    assert not any(info.values()), info


def test_fp8_is_written_and_read(checkpoints, tmp_path: Path):
    hf, megatron, fp8 = checkpoints["moe"], tmp_path / "megatron", tmp_path / "fp8"
    run_ranks(1, there, hf, megatron)
    run_ranks(2, back, megatron, fp8, None, "fp8")
    written, original = tensors(fp8), tensors(hf)
    high = read_config(fp8)["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in high and "model.layers.0.mlp.gate" in high and "model.layers.0.self_attn.q_proj" not in high
    with HFCheckpoint(fp8) as checkpoint:
        assert set(checkpoint.files) == set(original)
        for name, value in original.items():
            coded = written[name].dtype == torch.float8_e4m3fn
            assert coded == (name.removesuffix(".weight") not in high), name
            read = checkpoint.read(name, ())
            if coded:
                scales = written[name + "_scale_inv"]
                assert torch.equal(read, dequantize(written[name], scales)), name
                # Half of the last of e4m3's 4 bits, of the largest number of a block where numbers are tiny.
                assert ((read - value).abs() <= value.abs() / 16 + value.abs().max() * 2**-18).all(), name
            else:
                assert torch.equal(read, value.bfloat16()), name
    run_ranks(1, there, fp8, tmp_path / "again")
    run_ranks(1, back, tmp_path / "again", tmp_path / "plain")
    plain = tensors(tmp_path / "plain")
    assert plain.keys() == original.keys() and {value.dtype for value in plain.values()} == {torch.bfloat16}
    assert "quantization_config" not in read_config(tmp_path / "plain")
    with HFCheckpoint(fp8) as checkpoint:
        assert all(torch.equal(value, checkpoint.read(name, ()).bfloat16()) for name, value in plain.items())


def with_mtp(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """A copy with a layer beyond the last, as DeepSeek-V3 publishes its multi-token prediction."""
    shutil.copytree(source, target)
    extra = {"model.layers.4.eh_proj.weight": torch.randn(32, 64), "model.layers.4.enorm.weight": torch.randn(32)}
    whole = load_file(target / "model.safetensors") | extra
    save_file(whole, target / "model.safetensors")
    config = read_config(target) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return extra


def test_tensors_that_no_model_holds_come_through(checkpoints, tmp_path: Path):
    extra = with_mtp(checkpoints["deepseek"], tmp_path / "hf")
    run_ranks(1, there, tmp_path / "hf", tmp_path / "megatron")
    assert differences(load_file(tmp_path / "megatron" / "hf" / "carried.safetensors"), extra) == []
    run_ranks(2, back, tmp_path / "megatron", tmp_path / "back")
    assert differences(tensors(tmp_path / "hf"), tensors(tmp_path / "back")) == []
