"""How a checkpoint stores a tensor: as it is, or as codes and factors that are decoded where they are read.

A quantised format is one class here, its names in `logical_names` and its choice in `form_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_gspo.weights.mxfp4 import GROUP, decode
from megatron_gspo.weights.quantize import BLOCK, dequantize, scale_shape
from megatron_gspo.weights.rules import Shape
from megatron_gspo.weights.tensor_file import Slices, bounds_of, is_finite

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
ROWS = 512  # decoded at a time


class Form(Protocol):
    """A tensor as the rest of the program sees it: plain numbers of `dtype` and `shape`."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read_into(self, region: Slices, out: torch.Tensor) -> None:
        """Copies tensor[region] into `out` on the CPU, converted to its dtype. Raises ValueError for NaN or infinity,
        naming file and tensor."""


class Stored(Form, Protocol):
    """A tensor of a file, which may be codes or factors."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class BlockFP8:
    """`X` in e4m3 beside `X_scale_inv` in fp32 or, as Qwen3 is published, 16 bits; reads as fp32."""

    codes: Stored
    scales: Stored
    block: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def shape(self) -> Shape:
        return self.codes.shape

    def read_into(self, region: Slices, out: torch.Tensor) -> None:
        bounds, kept = bounds_of(region, self.shape, self.codes.name)
        if tuple(out.shape) != kept:
            raise ValueError(f"{self.codes.name}: region of shape {list(kept)} does not fit into {list(out.shape)}")
        (*leading, (top, bottom), (left, right)) = bounds
        target = out.detach().view(tuple(stop - start for start, stop in bounds))
        high, wide = self.block
        step = -(-ROWS // high) * high  # whole blocks of rows
        for row in range(top - top % high, bottom, step):
            first, last = max(row, top), min(row + step, bottom)
            rows, columns = slice(first, last), slice(left, right)
            blocks = slice(first // high, -(-last // high)), slice(left // wide, -(-right // wide))
            outer = tuple(slice(*bound) for bound in leading)
            codes, scales = _read(self.codes, (*outer, rows, columns)), _read(self.scales, (*outer, *blocks))
            numbers = dequantize(codes, scales, (first, left), self.block)
            if numbers.numel() and not is_finite(numbers):
                raise ValueError(f"{self.codes.path}: {self.codes.name} holds NaN or infinity; copy the file again")
            target[..., first - top : last - top, :].copy_(numbers)


@dataclass(frozen=True)
class MXFP4:
    """`X` [experts, 32 x groups, columns], which is stored transposed: `X_blocks` uint8 [experts, columns, groups, 16]
    beside `X_scales` uint8 [experts, columns, groups]. Reads as bf16, which holds every value."""

    codes: Stored
    scales: Stored

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def shape(self) -> Shape:
        experts, columns, groups, _ = self.codes.shape
        return experts, groups * GROUP, columns

    def read_into(self, region: Slices, out: torch.Tensor) -> None:
        bounds, kept = bounds_of(region, self.shape, self.codes.name)
        if tuple(out.shape) != kept:
            raise ValueError(f"{self.codes.name}: region of shape {list(kept)} does not fit into {list(out.shape)}")
        (first, last), (top, bottom), (left, right) = bounds
        target = out.detach().view(last - first, bottom - top, right - left)
        groups = slice(top // GROUP, -(-bottom // GROUP))
        rows = slice(top - groups.start * GROUP, bottom - groups.start * GROUP)
        for expert in range(first, last):
            for start in range(left, right, ROWS):
                stop = min(start + ROWS, right)
                part = slice(expert, expert + 1), slice(start, stop), groups
                numbers = decode(_read(self.codes, part), _read(self.scales, part))[0, :, rows]
                if numbers.numel() and not is_finite(numbers):
                    raise ValueError(f"{self.codes.path}: {self.codes.name} holds NaN or infinity; copy the file again")
                target[expert - first, :, start - left : stop - left].copy_(numbers.T)


Coded = BlockFP8 | MXFP4


def _read(tensor: Stored, region: tuple[slice, ...]) -> torch.Tensor:
    _, kept = bounds_of(region, tensor.shape, tensor.name)
    block = torch.empty(kept, dtype=tensor.dtype)
    tensor.read_into(region, block)
    return block


def logical_names(names: Collection[str], quantization: Mapping[str, Any] | None) -> dict[str, str]:
    """The tensors that a checkpoint with tensors `names` holds once it is decoded, each with the stored one that holds
    its numbers or codes. `quantization` is config.json's quantization_config. Raises ValueError for a method that is
    not read."""
    method = (quantization or {}).get("quant_method")
    if quantization is None:
        return {name: name for name in names}
    if method == "mxfp4":
        factors = {name.removesuffix(BLOCKS) + SCALES for name in names if name.endswith(BLOCKS)}
        return {name.removesuffix(BLOCKS): name for name in names if name not in factors}
    if method != "fp8" or not quantization.get("weight_block_size"):
        kind = f"quant_method {method!r}" + (" without weight_block_size" if method == "fp8" else "")
        raise ValueError(
            f"config.json: quantization_config has {kind}; only blockwise fp8 (weight_scale_inv) and mxfp4 are "
            "read. Take the checkpoint in high precision"
        )
    return {name: name for name in names if not (name.endswith(SCALE) and name.removesuffix(SCALE) in names)}


def form_of(name: str, find: Callable[[str], Stored | None], quantization: Mapping[str, Any] | None) -> Form:
    """How tensor `name` is stored. `find` gives the stored tensor of a name, None where there is none.

    Raises ValueError naming file and tensor for parts that are missing, or whose dtypes or shapes do not fit.
    """
    stored = find(name)
    if stored is None:
        return _mxfp4(name, find)
    if stored.dtype in FLOATS:
        return stored
    scales = find(name + SCALE) if quantization else None
    if stored.dtype != torch.float8_e4m3fn or scales is None:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(
            f"{stored.path}: {name} is {str(stored.dtype).removeprefix('torch.')}; only {kinds} can be loaded, and "
            f"float8_e4m3fn with a {name + SCALE} and a quantization_config in config.json. Dequantise the checkpoint "
            "first"
        )
    rows, columns = (quantization or {}).get("weight_block_size", BLOCK)
    expected = scale_shape(stored.shape, (rows, columns)) if len(stored.shape) > 1 else None
    if scales.shape != expected or scales.dtype not in FLOATS:
        raise ValueError(
            f"{scales.path}: {scales.name} is {scales.dtype} {list(scales.shape)}, expected floats {expected} for "
            f"{name} {list(stored.shape)} in blocks of {rows} x {columns}"
        )
    return BlockFP8(stored, scales, (rows, columns))


def _mxfp4(name: str, find: Callable[[str], Stored | None]) -> Form:
    codes, scales = find(name + BLOCKS), find(name + SCALES)
    assert codes is not None, name
    if scales is None:
        raise ValueError(f"{codes.path}: {codes.name} has no {name + SCALES} beside it; copy the checkpoint again")
    for part, shape in ((codes, (*codes.shape[:3], GROUP // 2)), (scales, codes.shape[:-1])):
        if part.dtype != torch.uint8 or part.shape != shape or len(codes.shape) != 4:
            raise ValueError(
                f"{part.path}: {part.name} is {part.dtype} {list(part.shape)}, expected uint8 {list(shape)}: codes are "
                f"[experts, columns, groups, {GROUP // 2}], each group with one scale"
            )
    return MXFP4(codes, scales)
