"""An HF checkpoint on disk: which tensors it holds, and regions of them. Headers are read, tensors only as asked."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_gspo.weights import pickles
from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.forms import Coded, Form, Stored, form_of, logical_names
from megatron_gspo.weights.rules import Shape
from megatron_gspo.weights.safetensors_file import SafetensorsFile
from megatron_gspo.weights.tensor_file import Slices, TensorFile

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


class HFCheckpoint:
    """A directory with `model.safetensors`, or with `model.safetensors.index.json` and its shards. Quantised tensors
    are decoded where they are read: names, shapes and dtypes are those of the decoded ones.

    `files` maps each tensor's name to its file, `form(name)` reads one. With `allow_pickle`, a directory that has
    `pytorch_model.bin` (or its index) instead is read by torch.load(weights_only=True), which executes nothing.
    `single`: another name for `model.safetensors`.
    Raises FileNotFoundError naming what is missing, and ValueError naming a file that is damaged, a quantisation that
    is not read, or pickle files without the flag.
    """

    def __init__(self, directory: str | Path, *, allow_pickle: bool = False, single: str = SINGLE):
        self.directory = Path(directory)
        self._opened: dict[str, SafetensorsFile | pickles.PickleFile] = {}
        self._index: Path | None = None
        self.form = cache(self._find_form)
        self.quantization = self._config().get("quantization_config")
        self._stored = self._find_files(allow_pickle, single)
        names = logical_names(self._stored, self.quantization)
        self.files = {name: self._stored[stored] for name, stored in names.items()}

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for file in self._opened.values():
            file.close()

    def shape(self, name: str) -> Shape:
        return self.form(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the numbers that are read. Raises ValueError for a dtype that cannot be loaded."""
        return self.form(name).dtype

    def is_plain(self, name: str) -> bool:
        """Whether the numbers are stored as they are read, not as codes."""
        return not isinstance(self.form(name), Coded)

    def read(self, name: str, region: Slices) -> torch.Tensor:
        """`tensor[region]` on the CPU, in `dtype(name)`; nothing else of the tensor is read."""
        form = self.form(name)
        kept = torch.empty(form.shape, device="meta")[tuple(region)].shape
        part = torch.empty(kept, dtype=form.dtype)
        form.read_into(region, part)
        return part

    def read_into(self, name: str, region: Slices, out: torch.Tensor) -> None:
        """Copies `tensor[region]` into `out`, on the CPU, converted to its dtype."""
        self.form(name).read_into(region, out)

    def parts(self, name: str) -> dict[str, Form]:
        """What the files hold for `name`, by their names: the tensor itself, or its codes and factors."""
        form = self.form(name)
        parts = (form.codes, form.scales) if isinstance(form, Coded) else ()
        return {part.name: part for part in parts} or {name: form}

    def where(self, name: str) -> tuple[str, int]:
        """File and byte at which the tensor begins: an order that reads files from front to back."""
        places = [part.place for part in self.parts(name).values() if isinstance(part, TensorFile)]
        return places[0] if places else ("", 0)

    def prefetch(self, name: str) -> None:
        """Lets the disk read the tensor while the caller does something else."""
        for part in self.parts(name).values():
            if isinstance(part, TensorFile):
                part.prefetch()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Opens every file, so that whatever is cut off or misplaced is known before the first tensor is read.

        Raises ValueError naming files that are damaged, or that hold other tensors than the index says.
        """
        by_file = defaultdict[str, set[str]](set)
        for name, file in self._stored.items():
            by_file[file].add(name)
        for done, (file, names) in enumerate(sorted(by_file.items()), start=1):
            found = set(self._open(file).tensors)
            if found != names:
                kinds = {"lacks": names - found, "holds besides": found - names}
                text = "; ".join(f"{kind} {listing(sorted(which))}" for kind, which in kinds.items() if which)
                raise ValueError(f"{self.directory / file} is not what {self._index} says: it {text}")
            if progress is not None:
                progress(done, len(by_file))

    def _config(self) -> dict[str, Any]:
        path = self.directory / CONFIG
        return read_json(path, "an object") if path.exists() else {}

    def _find_form(self, name: str) -> Form:
        return form_of(name, self._find, self.quantization)

    def _find(self, name: str) -> Stored | None:
        file = self._stored.get(name)
        if file is None:
            return None
        tensors = self._open(file).tensors
        if name not in tensors:
            raise ValueError(
                f"{self.directory / file}: holds no {name}, which {self._index} says; copy the checkpoint again"
            )
        return tensors[name]

    def _open(self, file: str) -> SafetensorsFile | pickles.PickleFile:
        if file not in self._opened:
            path = self.directory / file
            self._opened[file] = pickles.PickleFile(path) if pickles.is_pickle(path) else SafetensorsFile(path)
        return self._opened[file]

    def _find_files(self, allow_pickle: bool, safetensors: str) -> dict[str, str]:
        names = [(INDEX, safetensors), *([(pickles.INDEX, pickles.SINGLE)] if allow_pickle else [])]
        for index, single in names:
            if (self.directory / index).exists():
                return self._sharded(self.directory / index)
            if (self.directory / single).exists():
                return dict.fromkeys(self._open(single).tensors, single)
        pickles.refuse(self.directory)
        raise FileNotFoundError(f"{self.directory}: neither {SINGLE} nor {INDEX}; an HF safetensors checkpoint has one")

    def _sharded(self, index: Path) -> dict[str, str]:
        files = read_json(index, "a weight_map").get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"{index}: expected JSON with a weight_map, got {type(files).__name__}")
        self._index = index
        missing = sorted(file for file in set(files.values()) if not (self.directory / file).exists())
        if missing:
            raise FileNotFoundError(
                f"{self.directory}: shards named in {index.name} that are not there: {listing(missing)}"
            )
        return files


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises ValueError naming it where it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON with {what}, got {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected JSON with {what}, got {type(value).__name__}")
    return value
