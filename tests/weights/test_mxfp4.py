"""MXFP4 against its definition in float64 and against transformers' own conversion; regions of stored tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_gspo.weights.mxfp4 import decode
from megatron_gspo.weights.source import HFCheckpoint


def value(code: int) -> float:
    """Of an e2m1 code: sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 140, 252, 254])
def test_every_pair_of_codes_at_every_kind_of_scale(scale: int):
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    found = decode(blocks, torch.full((16,), scale, dtype=torch.uint8))
    exact = [value(code) * 2.0 ** (scale - 127) for byte in range(256) for code in (byte % 16, byte // 16)]
    expected = torch.tensor(exact, dtype=torch.float64).to(torch.bfloat16)  # 4 and 6 times 2**127 are infinite
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    if scale < 254:
        assert torch.equal(found.double(), torch.tensor(exact, dtype=torch.float64))
    assert torch.equal(found.signbit(), expected.signbit())  # also of zeros


def test_scale_255_is_not_a_number():
    assert decode(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1,), 255, dtype=torch.uint8)).isnan().all()


def packed(experts: int, columns: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (experts, columns, groups, 16), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(110, 140, codes.shape[:-1], generator=generator, dtype=torch.uint8)


def checkpoint(directory: Path, **tensors: torch.Tensor) -> HFCheckpoint:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    return HFCheckpoint(directory)


@pytest.mark.parametrize(
    "region",
    [(), (1,), (slice(1, 3), slice(5, 70), slice(600, 1100)), (2, slice(32, 64), slice(0, 1)), (0, slice(95, 96))],
)
def test_regions_are_those_of_transformers_tensor(tmp_path: Path, region: tuple):
    codes, scales = packed(3, 1100, 3)  # more columns than are decoded at a time
    expected = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)
    with checkpoint(tmp_path, w_blocks=codes, w_scales=scales, b=torch.ones(2)) as source:
        assert sorted(source.files) == ["b", "w"] and source.shape("w") == (3, 96, 1100)
        assert torch.equal(source.read("w", region), expected[region])
        out = torch.empty(expected[region].mT.shape, dtype=torch.float32)
        source.read_into("w", region, out.mT)
        assert torch.equal(out.mT, expected[region].float())
        assert not source.is_plain("w") and sorted(source.parts("w")) == ["w_blocks", "w_scales"]


def test_damaged_parts_are_named(tmp_path: Path):
    codes, scales = packed(2, 4, 3)
    for name, tensors, message in [
        ("alone", {"w_blocks": codes}, r"w_blocks has no w_scales"),
        (
            "shape",
            {"w_blocks": codes, "w_scales": scales[:, :, :2].contiguous()},
            r"w_scales is .*\[2, 4, 2\], expected",
        ),
        ("dtype", {"w_blocks": codes.int(), "w_scales": scales}, r"w_blocks is torch\.int32"),
        ("nan", {"w_blocks": codes, "w_scales": torch.full_like(scales, 255)}, r"w_blocks holds NaN"),
    ]:
        (tmp_path / name).mkdir()
        with checkpoint(tmp_path / name, **tensors) as source, pytest.raises(ValueError, match=message):
            source.read("w", ())
