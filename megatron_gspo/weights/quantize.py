"""Blockwise FP8 as HF checkpoints hold it: e4m3 codes, and one fp32 factor for every block of 128 x 128 weights.

    weight = code * scale_inv[row // 128, column // 128]

Pure functions on tensors; leading dimensions (stacked experts) are independent.
"""

from __future__ import annotations

import torch

BLOCK = (128, 128)
E4M3_MAX = 448.0


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Shape of the factors of a weight of `shape` [..., rows, columns]: blocks at the edges may be smaller."""
    *leading, rows, columns = shape
    return (*leading, -(-rows // block[0]), -(-columns // block[1]))


def quantize(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] of any float dtype -> (e4m3 codes of that shape, fp32 factors of `scale_shape`).

    A factor is amax / 448 of its block (1 for a block of zeros), with `power_of_two` rounded up to a power of two, as
    Blackwell's and Transformer Engine's kernels want them. Divides, then casts, in fp32: as DeepSeek-V3 published.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scale_shape((rows, columns), block), dtype=torch.float32, device=weight.device)
    for number, first in enumerate(range(0, rows, block[0])):
        band = weight[first : first + block[0]].float()
        amax = torch.stack([part.abs().amax() for part in band.split(block[1], dim=1)])
        scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
        if power_of_two:
            mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        scales[number] = scale
        spread = scale.repeat_interleave(block[1])[:columns]
        codes[first : first + block[0]] = (band / spread).clamp_(-E4M3_MAX, E4M3_MAX).to(codes.dtype)
    return codes, scales


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, first: tuple[int, int] = (0, 0), block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """e4m3 [..., r, c], whose upper left is weight [..., first], and factors of the blocks that they touch, -> fp32."""
    spread = scales
    for dim, start, length, size in zip((-2, -1), first, codes.shape[-2:], block, strict=True):
        blocks = (torch.arange(start, start + length, device=codes.device) // size) - start // size
        spread = spread.index_select(dim, blocks)
    return codes.float().mul_(spread)
