"""Dense tensors in files: regions of them read straight into memory that the caller owns, without mapping the file.

Reads and writes go in pieces that fit a core's cache: what is read is checked for NaN while it is there (14 GB/s), and
the page cache takes pieces of 1 MiB several times faster than larger ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron_gspo.weights.rules import Shape

CHUNK_BYTES = 2**20
FLUSH_BYTES = 4 * 2**20
Bounds = tuple[int, int]
Slices = Sequence[slice | int]


@dataclass(frozen=True)
class TensorFile:
    """A row-major tensor `name` at byte `offset` of the file `path`, open as `descriptor`."""

    path: Path
    descriptor: int
    name: str
    offset: int
    dtype: torch.dtype
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[str, int]:
        """Where it begins: reading tensors in this order reads files from front to back."""
        return str(self.path), self.offset

    def prefetch(self) -> None:
        """Lets the disk read all of it while the caller does something else."""
        os.posix_fadvise(self.descriptor, self.offset, self.size_bytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, region: Slices, out: torch.Tensor, *, finite: bool = True) -> None:
        """Copies `tensor[region]` into `out`, of that shape on the CPU, converted to its dtype.

        `finite`: raise ValueError naming file and tensor where what is read holds NaN or infinity (floats of 16 bits or
        more; smaller ones are codes, checked once they are decoded).
        """
        bounds, kept = bounds_of(region, self.shape, self.name)
        out = out.detach()
        if tuple(out.shape) != kept:
            raise ValueError(f"{self.name}: region of shape {list(kept)} does not fit into {list(out.shape)}")
        if out.numel():
            lengths = tuple(stop - start for start, stop in bounds)
            self._read(self.offset, self.shape, bounds, out.view(lengths), finite and self.dtype.itemsize > 1)

    def _read(self, offset: int, shape: Shape, bounds: Sequence[Bounds], out: torch.Tensor, finite: bool) -> None:
        stride = prod(shape[1:]) * self.dtype.itemsize
        if not shape:
            return self._read_run(offset, out.reshape(1), finite)
        start, stop = bounds[0]
        if all(bound == (0, length) for bound, length in zip(bounds[1:], shape[1:], strict=True)):
            self._read_run(offset + start * stride, out, finite)
        elif stride > CHUNK_BYTES:
            for row in range(start, stop):
                self._read(offset + row * stride, shape[1:], bounds[1:], out[row - start], finite)
        else:
            columns = tuple(slice(*bound) for bound in bounds[1:])
            step = CHUNK_BYTES // stride
            for first in range(start, stop, step):
                rows = min(step, stop - first)
                block = torch.empty((rows, *shape[1:]), dtype=self.dtype)
                self._read_run(offset + first * stride, block, finite)
                out[first - start : first - start + rows].copy_(block[:, *columns])

    def _read_run(self, offset: int, out: torch.Tensor, finite: bool) -> None:
        """As many consecutive numbers as `out` has."""
        direct = out.is_contiguous() and out.dtype == self.dtype
        target = out.view(-1) if direct else out
        stride = self.dtype.itemsize * prod(target.shape[1:])
        if stride > CHUNK_BYTES:
            for row in range(len(target)):
                self._read_run(offset + row * stride, target[row], finite)
            return
        rows = CHUNK_BYTES // stride
        for first in range(0, len(target), rows):
            part = target[first : first + rows]
            block = part if direct else torch.empty(part.shape, dtype=self.dtype)
            self._fill(block, offset + first * stride)
            if finite and not is_finite(block):
                raise ValueError(
                    f"{self.path}: {self.name} holds NaN or infinity; the checkpoint is damaged or of a training run "
                    "that diverged"
                )
            if not direct:
                part.copy_(block)

    def _fill(self, block: torch.Tensor, offset: int) -> None:
        buffer, done = bytes_of(block), 0
        while done < len(buffer):
            count = os.preadv(self.descriptor, [buffer[done : done + CHUNK_BYTES]], offset + done)
            if not count:
                raise ValueError(f"{self.path} ends inside {self.name}; the file is cut off, copy it again")
            done += count


def bounds_of(region: Slices, shape: Shape, name: str) -> tuple[tuple[Bounds, ...], Shape]:
    """(start, stop) of `region` in every dimension of `shape`, and the shape of tensor[region]. Leading dimensions of
    `region` may be integers. Raises ValueError for a region that leaves the tensor."""
    if len(region) > len(shape):
        raise ValueError(f"{name} of shape {list(shape)} has no region of {len(region)} dimensions")
    bounds, kept = [], []
    for position, length in enumerate(shape):
        part = region[position] if position < len(region) else slice(None)
        start, stop = (part, part + 1) if isinstance(part, int) else (part.start or 0, part.stop)
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(f"{name} of shape {list(shape)} has no [{start}:{stop}] in dimension {position}")
        bounds.append((start, stop))
        if not isinstance(part, int):
            kept.append(stop - start)
    return tuple(bounds), tuple(kept)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not a copy."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a float tensor [at least one element] holds neither NaN nor infinity: one pass, no memory."""
    low, high = torch.aminmax(tensor)  # NaN wins both
    return bool((low.isfinite() & high.isfinite()).item())


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at byte `offset`.

    The disk begins at once, where the kernel would wait until a tenth of the memory is unwritten, and fsync for it all.
    """
    done = flushed = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + CHUNK_BYTES], offset + done)
        if done - flushed >= FLUSH_BYTES or (done == len(data) and done >= CHUNK_BYTES):
            os.posix_fadvise(descriptor, offset + flushed, done - flushed, os.POSIX_FADV_DONTNEED)
            flushed = done


def write_tensor(descriptor: int, tensor: torch.Tensor, offset: int) -> None:
    """Writes a tensor [any strides, any device] row-major at byte `offset`."""
    write_all(descriptor, bytes_of(tensor.detach().cpu().contiguous()), offset)
