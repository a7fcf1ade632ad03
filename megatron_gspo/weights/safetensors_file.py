"""Safetensors files: 8 bytes of header length (little-endian), a JSON header, the tensors without gaps.

The header is known before the first tensor, so a file is written tensor by tensor, whatever its size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.rules import Shape
from megatron_gspo.weights.tensor_file import TensorFile, write_tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_HEADER_BYTES = 100_000_000  # what the reference implementation accepts


@dataclass(frozen=True)
class Spec:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file open for reading; `tensors` by name. Raises ValueError naming a file that is cut off or damaged."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.tensors = self._read_header()
        except ValueError as error:
            size = os.fstat(self._descriptor).st_size
            os.close(self._descriptor)
            raise ValueError(
                f"{path} ({size} bytes) is damaged or no safetensors file: {error}; copy it again"
            ) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _read_header(self) -> dict[str, TensorFile]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, LARGEST_HEADER_BYTES):
            raise ValueError(f"its header would be {length} bytes long")
        header = json.loads(os.pread(self._descriptor, length, 8))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        tensors, end = {}, 8 + length
        for name, entry in sorted(header.items(), key=_start):
            try:
                dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"its header describes {name} as {str(entry)[:200]}") from error
            tensor = TensorFile(self.path, self._descriptor, name, 8 + length + start, dtype, shape)
            if tensor.offset != end or stop - start != tensor.size_bytes:
                raise ValueError(f"{name} {list(shape)} lies at bytes {start} to {stop}, which is not where it fits")
            tensors[name], end = tensor, end + tensor.size_bytes
        if end != size:
            raise ValueError(f"its tensors end at byte {end}")
        return tensors


def _start(item: tuple[str, Mapping]) -> int:
    try:
        start = item[1]["data_offsets"][0]
    except (KeyError, TypeError, IndexError):
        start = None
    if not isinstance(start, int):
        raise ValueError(f"its header gives no data_offsets for {item[0]}")
    return start


class SafetensorsWriter:
    """Writes `tensors` into a new file, in any order and one at a time. Leaving the block early removes the file.

    Raises OSError naming the file where the disk fails.
    """

    def __init__(self, path: Path, tensors: Sequence[Spec]):
        self.path = path
        header, self._places, end = dict[str, object](__metadata__={"format": "pt"}), dict[str, tuple[Spec, int]](), 0
        # Widest numbers first, so that every tensor is aligned to its own.
        for spec in sorted(tensors, key=lambda spec: -spec.dtype.itemsize):
            offsets = [end, end + spec.size_bytes]
            header[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
            self._places[spec.name] = spec, end
            end = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.pwrite(self._descriptor, len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The whole of tensor `name`, once. It may be on any device."""
        spec, offset = self._places.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), (
            f"{name} is {tensor.dtype} {list(tensor.shape)}, announced as {spec.dtype} {list(spec.shape)}"
        )
        try:
            write_tensor(self._descriptor, tensor, self._start + offset)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if kind is None:
                assert not self._places, f"{self.path}: never written: {listing(self._places)}"
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            if kind is not None:
                self.path.unlink()
