"""A checkpoint of either kind as HF tensors: names, shapes, dtypes, and numbers as they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_gspo.convert.dcp_read import MegatronCheckpoint, is_megatron
from megatron_gspo.convert.skeleton import Skeleton, skeleton
from megatron_gspo.convert.to_hf import Item, hf_folder, items_of, sources_of
from megatron_gspo.weights.bind import Binding
from megatron_gspo.weights.claims import Claim, claims_of
from megatron_gspo.weights.export import assemble
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.hf_folder import CARRIED
from megatron_gspo.weights.load import Place, locate, read_shard
from megatron_gspo.weights.safetensors_file import Spec
from megatron_gspo.weights.source import CONFIG, HFCheckpoint, read_json


class Side(ABC):
    """`specs` by HF name, in the unfused spelling where the family has one."""

    def __init__(self, directory: Path, kind: str, hf_config: Mapping[str, Any]):
        self.directory, self.kind, self.hf_config = directory, kind, hf_config
        self.specs: dict[str, Spec] = {}

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the dtype of its spec."""

    @abstractmethod
    def fill(self, binding: Binding) -> None:
        """Fills the parameters of a whole model on the CPU."""


@contextmanager
def side(directory: Path, hf: Path | None = None) -> Iterator[Side]:
    """Opens a checkpoint. hf: the HF checkpoint that a Megatron one came from (default: its folder `hf`).

    Raises FileNotFoundError or ValueError for what is no checkpoint, is damaged, or is of no supported family.
    """
    with ExitStack() as stack:
        if is_megatron(directory):
            origin = hf_folder(directory, hf)
            hf_config = read_json(origin / CONFIG, "an object")
            checkpoint = stack.enter_context(MegatronCheckpoint(directory))
            model, carried = skeleton(hf_config, checkpoint.tensors), None
            if (origin / CARRIED).exists():
                carried = stack.enter_context(HFCheckpoint(origin, single=CARRIED))
            yield _MegatronSide(directory, hf_config, checkpoint, model, carried)
        else:
            source = stack.enter_context(HFCheckpoint(directory))
            if not (directory / CONFIG).exists():
                raise FileNotFoundError(f"{directory / CONFIG} does not exist; expected a checkpoint of either kind")
            yield _HFSide(directory, read_json(directory / CONFIG, "an object"), source)


class _HFSide(Side):
    def __init__(self, directory: Path, hf_config: Mapping[str, Any], source: HFCheckpoint):
        super().__init__(directory, "HF", hf_config)
        self._source = source
        self._reads: dict[str, Any] = {name: partial(source.read_into, name, ()) for name in source.files}
        shapes = {name: source.shape(name) for name in source.files}
        dtypes = {name: source.dtype(name) for name in source.files}
        for claim in claims_of(family_for(hf_config).rules(hf_config)):
            self._unfuse(claim, shapes, dtypes)
        self.specs = {name: Spec(name, dtypes[name], shapes[name]) for name in self._reads}

    def _unfuse(self, claim: Claim, shapes: dict[str, Any], dtypes: dict[str, torch.dtype]) -> None:
        """Gives rows of a stacked tensor the names that they have alone."""
        for tensor in claim.hf:
            stacked = tensor.stacked
            if stacked is None or stacked.only or stacked.name not in self._source.files:
                continue
            place = Place(tensor, stacked.name, stacked.shape, claim.expert)
            self._reads[tensor.name] = partial(place.read_into, self._source, ())
            shapes[tensor.name], dtypes[tensor.name] = tensor.shape, self._source.dtype(stacked.name)
            self._reads.pop(stacked.name, None)

    def read(self, name: str) -> torch.Tensor:
        out = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self._reads[name](out)
        return out

    def fill(self, binding: Binding) -> None:
        places = locate(self._source, binding)
        for bound in binding.bound:
            read_shard(self._source, places[bound.claim.index], bound, bound.parameter)


class _MegatronSide(Side):
    def __init__(
        self,
        directory: Path,
        hf_config: Mapping[str, Any],
        checkpoint: MegatronCheckpoint,
        model: Skeleton,
        carried: HFCheckpoint | None,
    ):
        super().__init__(directory, "Megatron", hf_config)
        self._checkpoint, self._carried = checkpoint, carried
        self._items: dict[str, Item] = {}
        self._sources = sources_of(checkpoint, model)
        for item in items_of(self._sources, None, fp8=False):
            for spec in item.specs:
                self._items[spec.name], self.specs[spec.name] = item, spec
        if carried is not None:
            self.specs |= {n: Spec(n, carried.dtype(n), carried.shape(n)) for n in carried.files}
        self._last: tuple[Item | None, dict[str, torch.Tensor]] = None, {}

    def read(self, name: str) -> torch.Tensor:
        item = self._items.get(name)
        if item is None:
            assert self._carried is not None
            return self._carried.read(name, ())
        if item is not self._last[0]:  # gate and up come out of one parameter, one after the other
            held = ((source.entry.bound.claim, [source.read(self._checkpoint)]) for source in item.sources)
            self._last = item, dict(assemble(held))
        return self._last[1][name]

    def fill(self, binding: Binding) -> None:
        parameters = {bound.name: bound.parameter for bound in binding.bound}
        for source in self._sources:
            parameters[source.entry.bound.name].copy_(source.read(self._checkpoint))
