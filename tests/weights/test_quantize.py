"""Blockwise FP8 against a loop over blocks in float64, and against the bounds that the format itself gives."""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.weights.quantize import dequantize, quantize, scale_shape


def weights(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(rows)
    weight = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    weight[: rows // 2, : columns // 3] = 0
    return weight


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(256, 384), (130, 257), (5, 3)])
def test_codes_and_factors_are_those_of_a_loop_over_blocks(shape: tuple[int, int], power_of_two: bool):
    weight = weights(*shape)
    codes, scales = quantize(weight, power_of_two=power_of_two)
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert tuple(scales.shape) == scale_shape(shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i, row in enumerate(weight.split(128)):
        for j, block in enumerate(row.split(128, dim=1)):
            exact = float(block.abs().max()) / 448 or 1.0
            scale = float(scales[i, j])
            if power_of_two:
                assert scale in {2.0**n for n in range(-60, 60)} and exact <= scale < 2 * exact
            else:
                assert scale == pytest.approx(exact, rel=1e-6)
            part = codes[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].double() * scale
            # e4m3 keeps 4 significant bits: half a unit is 1/16 of a value; below 2^-6 steps are 2^-9.
            bound = (block.double().abs() / 16).clamp(min=scale * 2**-10) * 1.001
            assert ((part - block.double()).abs() <= bound).all()


@pytest.mark.parametrize("region", [(0, 130, 0, 257), (100, 130, 5, 6), (127, 129, 127, 257), (128, 130, 0, 256)])
def test_a_region_decodes_like_the_whole(region: tuple[int, int, int, int]):
    codes, scales = quantize(weights(130, 257))
    whole = codes.double() * scales.double().repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :257]
    top, bottom, left, right = region
    blocks = scales[top // 128 : -(-bottom // 128), left // 128 : -(-right // 128)]
    part = dequantize(codes[top:bottom, left:right], blocks, (top, left))
    assert part.dtype == torch.float32
    assert torch.allclose(part.double(), whole[top:bottom, left:right], rtol=2**-23, atol=0)  # one fp32 rounding


def test_codes_survive_a_round_trip():
    codes, scales = quantize(weights(256, 256))
    again, factors = quantize(dequantize(codes, scales))
    assert torch.equal(again.float() * factors.repeat_interleave(128, 0).repeat_interleave(128, 1),
                       codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1))  # fmt: skip
