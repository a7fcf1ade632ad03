"""FP8 checkpoints read like those in high precision, region by region; what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.load import load_hf
from megatron_gspo.weights.save import save_hf
from megatron_gspo.weights.source import HFCheckpoint
from tests.ranks import run_ranks
from tests.weights.models import built, read_config, write_checkpoint

Tensors = dict[str, torch.Tensor]
SINGLE = "model.safetensors"


def write(folder: Path, tensors: Tensors, block: tuple[int, int] | None = (128, 128), method: str = "fp8") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE)
    quantization = {"quant_method": method} | ({"weight_block_size": list(block)} if block else {})
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("shape", [(300, 260), (3, 140, 200)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])  # Qwen3's factors have 16 bits
def test_any_region_of_codes_is_that_of_the_whole(
    tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype
):
    torch.manual_seed(0)
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    *leading, rows, columns = shape
    scales = torch.rand(*leading, -(-rows // block[0]), -(-columns // block[1])).to(dtype) + 0.5
    spread = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    whole = codes.float() * spread
    folder = write(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scales, "b": torch.ones(3)}, block)
    with HFCheckpoint(folder) as checkpoint:
        assert set(checkpoint.files) == {"x.weight", "b"}
        assert checkpoint.dtype("x.weight") == torch.float32 and checkpoint.shape("x.weight") == shape
        first = (slice(None),) * len(leading)
        for region in [
            (),
            (*first, slice(127, 129)),
            (*first, slice(3, 140), slice(130, 131)),
            (*first, slice(0, 64), slice(31, 200)),
            *([(2,), (1, slice(64, 65))] if leading else []),
        ]:
            assert torch.equal(checkpoint.read("x.weight", region), whole[region]), region
        out = torch.zeros(*shape, dtype=torch.bfloat16)
        checkpoint.read_into("x.weight", (), out)
        assert torch.equal(out, whole.bfloat16())


def codes(**changed: torch.Tensor) -> Tensors:
    base = {"x.weight": torch.ones(130, 20).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(2, 1)}
    return {name: value for name, value in (base | changed).items() if value.numel()}


nan = torch.ones(130, 20)
nan[129, 3] = float("nan")
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no factors": (
        lambda f: write(f, codes(**{"x.weight_scale_inv": torch.zeros(0)})),
        "x.weight is float8_e4m3fn; only float64",
    ),
    "shape": (
        lambda f: write(f, codes(**{"x.weight_scale_inv": torch.ones(1, 1)})),
        r"x.weight_scale_inv is torch.float32 \[1, 1\], expected floats \(2, 1\) for x.weight \[130, 20\]",
    ),
    "dtype": (
        lambda f: write(f, codes(**{"x.weight_scale_inv": torch.ones(2, 1).to(torch.float8_e8m0fnu)})),
        "x.weight_scale_inv is torch.float8_e8m0fnu",
    ),
    "nan": (
        lambda f: write(f, codes(**{"x.weight": nan.to(torch.float8_e4m3fn)})),
        "model.safetensors: x.weight holds NaN",
    ),
    "per tensor": (lambda f: write(f, codes(), block=None), "quant_method 'fp8' without weight_block_size"),
    "gptq": (lambda f: write(f, codes(), method="gptq"), "quant_method 'gptq'; only blockwise fp8"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_codes_that_do_not_fit_are_named(tmp_path: Path, wrong: str):
    make, message = WRONG[wrong]
    make(tmp_path / wrong)
    with pytest.raises(ValueError, match=message), HFCheckpoint(tmp_path / wrong) as checkpoint:
        checkpoint.read("x.weight", ())


def export(source: Path, target: Path) -> None:
    with built(source, LayoutConfig(tp=2, ep=2)) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        load_hf(source, binding)
        save_hf(target, plan_export(binding), source)


def test_an_fp8_checkpoint_loads_on_tp2_and_its_export_says_that_it_is_none(tmp_path: Path):
    source = tmp_path / "source"
    write_checkpoint(source, moe=True, tie_word_embeddings=False)
    tensors, wanted = load_file(source / SINGLE), Tensors()
    for name, value in list(tensors.items()):
        if name.endswith("_proj.weight"):
            tensors[name] = value.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.75)
            wanted[name] = tensors[name].float() * 0.75
        else:
            wanted[name] = value
    save_file(tensors, source / SINGLE)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = read_config(source) | {"quantization_config": quantization}
    (source / "config.json").write_text(json.dumps(config))
    run_ranks(2, export, source, tmp_path / "target")
    found = {n: t for path in (tmp_path / "target").glob("*.safetensors") for n, t in load_file(path).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert "quantization_config" not in read_config(tmp_path / "target")
