"""The files of torch.distributed.checkpoint, written one tensor at a time: `__RANK_0.distcp` holds what torch.save
makes of each tensor, one after the other; `.metadata` says where each begins."""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_gspo.weights.output import fsync
from megatron_gspo.weights.rules import Shape
from megatron_gspo.weights.tensor_file import write_all


@dataclass(frozen=True)
class Written:
    """A chunk of tensor `key`, or (no dtype) an object, at bytes [start, start + length) of `file`."""

    key: str
    file: str
    start: int
    length: int
    dtype: torch.dtype | None = None
    global_shape: Shape = ()
    offsets: Shape = ()
    sizes: Shape = ()


class DcpFile(io.RawIOBase):
    """One rank's file. Raises OSError naming it where the disk fails."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.written: list[Written] = []
        self._end = 0
        self._failure: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Any) -> int:
        """What torch.save calls; appends."""
        view = memoryview(data).cast("B")
        try:
            write_all(self._descriptor, view, self._end)
        except OSError as error:
            error.filename = str(self.path)
            self._failure = error
            raise
        self._end += len(view)
        return len(view)

    def add_tensor(self, key: str, tensor: torch.Tensor, global_shape: Shape, offsets: Shape) -> None:
        """`tensor` (contiguous, on the CPU) as the chunk of `key` at `offsets`."""
        place = {"global_shape": global_shape, "offsets": offsets, "sizes": tuple(tensor.shape)}
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes the whole storage
            tensor = _alone(tensor)
        self._add(key, tensor, dtype=tensor.dtype, **place)

    def add_object(self, key: str, value: Any) -> None:
        self._add(key, value)

    def _add(self, key: str, value: Any, **place: Any) -> None:
        start, before = self._end, get_crc32_options()
        set_crc32_options(False)  # nothing reads the checksum, and it costs as much as the copy
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except RuntimeError:
            # Of a write that fails, torch's archive says that its position is not the expected one.
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            set_crc32_options(before)
        self.written.append(Written(key, self.path.name, start, self._end - start, **place))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is None:
            os.fsync(self._descriptor)
        os.close(self._descriptor)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a storage of their own, without a copy."""
    assert tensor.is_contiguous()
    data = tensor.view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)


def write_metadata(folder: Path, written: Iterable[Written]) -> None:
    """`.metadata` over what all ranks have written."""
    chunks: dict[str, list[Written]] = defaultdict(list)
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for one in written:
        info = _StorageInfo(one.file, one.start, one.length)
        if one.dtype is None:
            state[one.key], places[MetadataIndex(one.key)] = BytesStorageMetadata(), info
        else:
            places[MetadataIndex(one.key, one.offsets, len(chunks[one.key]))] = info
            chunks[one.key].append(one)
    state |= {key: _tensor(found) for key, found in chunks.items()}
    metadata = Metadata(state, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(metadata))
    fsync(path)


def _tensor(chunks: Sequence[Written]) -> TensorStorageMetadata:
    first = chunks[0]
    assert first.dtype is not None
    return TensorStorageMetadata(
        TensorProperties(dtype=first.dtype),
        torch.Size(first.global_shape),
        [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in chunks],
    )
