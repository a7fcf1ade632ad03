"""Torch distributed checkpoints, read without Megatron and without running anything that they hold.

`.metadata` is a pickle: only the classes that a checkpoint's description consists of are made from it. Tensors are what
torch.save wrote; of each, torch.load(weights_only=True) reads the description alone, onto the meta device, and their
numbers are read from the file, region by region.
"""

from __future__ import annotations

import os
import pickle
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_gspo.weights.rules import Shape
from megatron_gspo.weights.tensor_file import TensorFile

METADATA, CONFIG = ".metadata", "metadata.json"
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    *((_DCP + "metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_DCP + "metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
    *((_DCP + "filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    # Megatron keeps the plan of the save beside the description.
    *((_DCP + "planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("collections", "OrderedDict"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),  # Megatron-Core before 0.16
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _ALLOWED
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint's description needs")


def read_metadata(directory: Path) -> Metadata:
    """Raises FileNotFoundError where there is none, and ValueError naming a file that is damaged or asks for more than
    a description is made of."""
    path = directory / METADATA
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected the folder of a Megatron distributed checkpoint")
    with path.open("rb") as file:
        try:
            metadata = _Restricted(file).load()
        except Exception as error:  # a damaged pickle fails in many ways
            raise ValueError(f"{path} is damaged or refused, nothing of it was run: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{path} describes no distributed checkpoint: it holds a {type(metadata).__name__}")
    return metadata


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, and where its file is."""

    offsets: Shape
    sizes: Shape
    place: _StorageInfo


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint, in the chunks that its layout cut it into."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Overlap:
    """What a rectangle and a chunk share: chunk[take] is rectangle[put]."""

    chunk: Chunk
    take: tuple[slice, ...]
    put: tuple[slice, ...]


class MegatronCheckpoint:
    """The tensors of a checkpoint by their Megatron keys. Raises as `read_metadata`, and ValueError naming files that
    are missing or cut off."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        metadata = read_metadata(self.directory)
        self.tensors = {
            key: _stored(key, entry, metadata.storage_data, self.directory)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._check_files()
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._opened: tuple[str, Chunk, TensorFile] | None = None

    def __enter__(self) -> MegatronCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stack.close()

    def overlaps(self, key: str, offsets: Shape, sizes: Shape) -> list[Overlap]:
        """The parts of a rectangle of tensor `key` and the chunks that hold them. Raises ValueError where they do not
        make up all of it."""
        found = [
            overlap for chunk in self.tensors[key].chunks if (overlap := _overlap(chunk, offsets, sizes)) is not None
        ]
        held = sum(prod(part.stop - part.start for part in overlap.put) for overlap in found)
        if held != prod(sizes):
            raise ValueError(
                f"{self.directory}: {key} {list(self.tensors[key].shape)} has {held} of the {prod(sizes)} numbers at "
                f"{list(offsets)}, size {list(sizes)}; was it written by a run that did not finish?"
            )
        return found

    def read_into(self, key: str, overlap: Overlap, out: torch.Tensor) -> None:
        """Copies what `overlap` shares into `out`, the whole rectangle [its sizes, any strides]. Raises ValueError
        naming file and tensor for NaN, infinity, and damage."""
        self._open(key, overlap.chunk).read_into(overlap.take, out[overlap.put])

    def prefetch(self, chunk: Chunk) -> None:
        """Lets the disk read the chunk while the caller does something else."""
        place = chunk.place
        os.posix_fadvise(self._file(place).fileno(), place.offset, place.length, os.POSIX_FADV_WILLNEED)

    def _file(self, place: _StorageInfo) -> Any:
        name = place.relative_path
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self.directory / name).open("rb", buffering=0))
        return self._files[name]

    def _open(self, key: str, chunk: Chunk) -> TensorFile:
        if self._opened is None or self._opened[:2] != (key, chunk):
            self._opened = key, chunk, self._describe(key, chunk)
        return self._opened[2]

    def _describe(self, key: str, chunk: Chunk) -> TensorFile:
        place = chunk.place
        path = self.directory / place.relative_path
        file = self._file(place)
        view: Any = _create_file_view(file, place.offset, place.length)
        try:
            tensor = torch.load(view, map_location="meta", weights_only=True)
        except Exception as error:  # a damaged archive fails in many ways
            raise ValueError(f"{path}: {key} at byte {place.offset} is damaged: {str(error)[:200]}") from error
        stored = self.tensors[key]
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (stored.dtype, chunk.sizes):
            said = f"{stored.dtype} {list(chunk.sizes)}"
            raise ValueError(f"{path}: {key} at byte {place.offset} is not the {said} that {METADATA} says")
        if not tensor.is_contiguous():
            raise ValueError(f"{path}: {key} is stored with strides {tensor.stride()}; only row-major tensors are read")
        archive: Any = tensor.untyped_storage()
        start = place.offset + archive._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        return TensorFile(path, file.fileno(), key, start, stored.dtype, chunk.sizes)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self.tensors.values():
            for chunk in stored.chunks:
                name = chunk.place.relative_path
                ends[name] = max(ends.get(name, 0), chunk.place.offset + chunk.place.length)
        for name, end in sorted(ends.items()):
            path = self.directory / name
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist, and {METADATA} says that it holds tensors")
            size = os.stat(path).st_size
            if size < end:
                raise ValueError(f"{path} is cut off: {size} bytes, and {METADATA} says {end}; copy it again")


def _stored(key: str, entry: TensorStorageMetadata, places: dict[Any, Any], directory: Path) -> Stored:
    chunks = []
    for chunk in entry.chunks:
        place = places.get(MetadataIndex(key, chunk.offsets))
        if (
            not isinstance(place, _StorageInfo)
            or place.transform_descriptors
            or Path(place.relative_path).name != place.relative_path
        ):
            raise ValueError(f"{directory / METADATA}: {key} at {list(chunk.offsets)} has no place that can be read")
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), replace(place)))
    return Stored(entry.properties.dtype, tuple(entry.size), tuple(chunks))


def _overlap(chunk: Chunk, offsets: Shape, sizes: Shape) -> Overlap | None:
    take, put = [], []
    for first, length, start, size in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        low, high = max(first, start), min(first + length, start + size)
        if low >= high:
            return None
        take.append(slice(low - first, high - first))
        put.append(slice(low - start, high - start))
    return Overlap(chunk, tuple(take), tuple(put))


def is_megatron(directory: Path) -> bool:
    """Whether a folder is, or means to be, a Megatron distributed checkpoint."""
    return (directory / METADATA).exists() or (directory / CONFIG).exists()
