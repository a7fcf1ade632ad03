"""MXFP4 of the OCP Microscaling format, as gpt-oss is published: 4-bit floats, 32 of them with one power of two.

    weight = e2m1(code) * 2 ** (scale - 127)

A code is a sign bit, two bits of exponent and one of mantissa; a byte holds two of them, the lower four bits first.
Scale 255 stands for NaN.
"""

from __future__ import annotations

import torch

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., groups, 16] and uint8 [..., groups] -> bf16 [..., groups x 32], exactly."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.bfloat16, device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    # Both numbers of a byte as one of 32 bits: a lookup of single elements is ten times as fast as one of rows.
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.int32)[:, 0]
    numbers = pairs.index_select(0, blocks.reshape(-1).int()).view(torch.bfloat16)
    factors = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return numbers.view(*scales.shape, GROUP).mul_(factors[..., None]).flatten(-2)
