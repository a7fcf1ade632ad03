"""An HF checkpoint on disk: which tensors it holds, and slices of them. Headers are read, tensors only as asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.rules import Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class HFCheckpoint:
    """A directory with `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Raises FileNotFoundError naming what is missing, and ValueError naming a file that is damaged. `files` maps each
    tensor's name to its file.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._stack = ExitStack()
        self._open: dict[str, safe_open] = {}
        self.files = self._sharded() if (self.directory / INDEX).exists() else self._single()

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stack.close()

    def shape(self, name: str) -> Shape:
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises ValueError for a dtype that is no plain float, such as that of a quantised checkpoint."""
        code = self._file(name).get_slice(name).get_dtype()
        if code not in DTYPES:
            raise ValueError(
                f"{self.directory / self.files[name]}: {name} is {code}; only {', '.join(DTYPES)} can be loaded. "
                "Dequantise the checkpoint first"
            )
        return DTYPES[code]

    def read(self, name: str, region: Sequence[slice | int]) -> torch.Tensor:
        """`tensor[region]` on the CPU, in the file's dtype; nothing else of the tensor is read."""
        return self._file(name).get_slice(name)[tuple(region)]

    def _file(self, name: str) -> safe_open:
        file = self.files[name]
        opened = self._opened(file)
        if name not in opened.keys():  # noqa: SIM118  (no mapping)
            raise ValueError(f"{self.directory / file}: holds no {name}, which {INDEX} says; copy the checkpoint again")
        return opened

    def _opened(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(
                    f"{path} ({path.stat().st_size} bytes) is damaged or no safetensors file: {error}; copy it again"
                ) from error
        return self._open[file]

    def _single(self) -> dict[str, str]:
        path = self.directory / SINGLE
        if not path.exists():
            raise FileNotFoundError(
                f"{self.directory}: neither {SINGLE} nor {INDEX}; an HF safetensors checkpoint has one"
            )
        return dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)

    def _sharded(self) -> dict[str, str]:
        index = self.directory / INDEX
        try:
            files = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{index}: expected JSON with a weight_map, got {type(error).__name__}: {error}"
            ) from error
        missing = sorted(file for file in set(files.values()) if not (self.directory / file).exists())
        if missing:
            raise FileNotFoundError(f"{self.directory}: shards named in {INDEX} that are not there: {listing(missing)}")
        return files
