"""HF safetensors straight into a rank's parameters: only the slices that it holds are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_gspo.weights.bind import Binding, Bound
from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.rules import HFTensor, Piece, Region
from megatron_gspo.weights.source import HFCheckpoint
from megatron_gspo.weights.tensor_file import Slices

Blocks = dict[tuple[str, int, int], torch.Tensor]  # of one expert: rows [start, stop) of a stacked tensor's entry


@dataclass(frozen=True)
class LoadReport:
    """What one rank read. `conversions` counts parameters by "from -> to" where the checkpoint's dtype is another."""

    num_parameters: int
    num_tensors: int
    size_bytes: int
    conversions: Mapping[str, int]


@dataclass(frozen=True)
class Place:
    """Where a checkpoint keeps an HF tensor: `name` itself, or entry `expert` of the tensor in which it is stacked."""

    tensor: HFTensor
    name: str
    shape: tuple[int, ...]
    expert: int | None = None

    def read_into(self, checkpoint: HFCheckpoint, take: Region, out: torch.Tensor, blocks: Blocks) -> None:
        """Copies the HF tensor's [take] into `out`. What was read for it and others alike is left in `blocks`."""
        stacked = self.tensor.stacked
        if self.expert is None or stacked is None:
            checkpoint.read_into(self.name, take, out)
            return
        start, stop, _ = (take[0] if take else slice(None)).indices(self.tensor.shape[0])
        first, offset = stacked.row // stacked.step * stacked.step, stacked.row % stacked.step
        rows = slice(first + start * stacked.step, first + stop * stacked.step)
        others = take[1:] or (slice(None),) * (len(self.tensor.shape) - 1)
        region: Slices = (self.expert, *others, rows) if stacked.transposed else (self.expert, rows, *others)
        if stacked.step == 1:
            checkpoint.read_into(self.name, region, out.T if stacked.transposed else out)
            return
        key = self.name, rows.start, rows.stop
        if key not in blocks:
            blocks[key] = torch.empty(rows.stop - rows.start, *out.shape[1:], dtype=out.dtype)
            checkpoint.read_into(self.name, region, blocks[key].T if stacked.transposed else blocks[key])
        out.copy_(blocks[key][offset :: stacked.step])


def load_hf(directory: str | Path, binding: Binding, progress: Callable[[int, int], None] | None = None) -> LoadReport:
    """Fills this rank's parameters, where they are and converted to their dtype, from the HF checkpoint in `directory`.

    Not a collective. `progress(done, total)` is called after each parameter. Beyond the parameters, memory holds one
    parameter at a time, twice where a checkpoint interleaves its rows. Nothing is written before names and shapes are
    checked: raises ValueError naming tensors that are missing, that no rule claims, or whose shape is not what
    config.json says, FileNotFoundError for missing files.

    The caller refreshes what derives from the parameters: `optimizer.reload_model_params()` copies them into the fp32
    main parameters, without which the first step undoes the load; with `overlap_param_gather`, no gather of older
    values may be pending.
    """
    with HFCheckpoint(directory) as checkpoint:
        places = locate(checkpoint, binding)
        size_bytes, tensors, conversions = 0, set[str](), Counter[str]()
        for done, bound in enumerate(binding.bound, start=1):
            sources = places[bound.claim.index]
            parameter = bound.parameter.detach()
            shard = parameter if parameter.is_cpu else torch.empty(parameter.shape, dtype=parameter.dtype)
            size_bytes += read_shard(checkpoint, sources, bound, shard)
            if shard is not parameter:
                parameter.copy_(shard)
            tensors.update(place.tensor.exported[0] for place in sources)
            conversions.update(_conversion(checkpoint.dtype(sources[0].name), parameter.dtype))
            if progress is not None:
                progress(done, len(binding.bound))
    return LoadReport(len(binding.bound), len(tensors), size_bytes, dict(conversions))


def checkpoint_shapes(directory: str | Path, binding: Binding) -> dict[str, tuple[int, ...]]:
    """Name and shape, as the headers in `directory` say, of every HF tensor in the spelling that is exported.

    Without multi-token-prediction layers: a server that loaded `directory` has exactly these, and would take any other
    name in silence. Raises as `load_hf`.
    """
    with HFCheckpoint(directory) as checkpoint:
        rows = zip(binding.claims, _places(checkpoint, binding), strict=True)
        places = [place for claim, row in rows if not claim.is_further for place in row]
        return {
            place.tensor.exported[0]: checkpoint.shape(place.name) if place.expert is None else place.tensor.exported[1]
            for place in places
        }


def locate(checkpoint: HFCheckpoint, binding: Binding) -> list[tuple[Place, ...]]:
    """Where `checkpoint` keeps the HF tensors of every claim of the model, by the claim's index. Raises ValueError
    naming tensors that are missing or that no rule claims, and those of this rank's parameters whose shape is not what
    config.json says."""
    places = _places(checkpoint, binding)
    _check_shapes(checkpoint, binding.bound, places)
    return places


def read_shard(checkpoint: HFCheckpoint, places: Sequence[Place], bound: Bound, out: torch.Tensor) -> int:
    """Fills `out` [the parameter's shape, any dtype, on the CPU] from the `places` of its claim, and what no HF tensor
    holds with zeros. Returns the bytes of the numbers that were read."""
    pieces = list(bound.pieces())
    if sum(out[piece.put].numel() for piece in pieces) < out.numel():
        out.zero_()
    blocks: Blocks = {}
    return sum(_read_into(checkpoint, places[piece.source], piece, out[piece.put], blocks) for piece in pieces)


def _read_into(checkpoint: HFCheckpoint, place: Place, piece: Piece, out: torch.Tensor, blocks: Blocks) -> int:
    """Fills `out`; returns the bytes of the numbers that were read."""
    place.read_into(checkpoint, piece.take, out, blocks)
    for duplicate in place.tensor.held_again:
        if duplicate in checkpoint.files and not torch.equal(
            checkpoint.read(place.name, piece.take), checkpoint.read(duplicate, piece.take)
        ):
            raise ValueError(
                f"{checkpoint.directory}: "
                + (
                    f"config.json ties {duplicate} to {place.name}, but their values differ; set tie_word_embeddings "
                    "to false or remove one of them"
                    if duplicate in place.tensor.duplicates
                    else f"{duplicate} is to repeat {place.name}, but their values differ; set policy.mtp: carry"
                )
            )
    return out.numel() * checkpoint.dtype(place.name).itemsize


def _conversion(source: torch.dtype, target: torch.dtype) -> list[str]:
    return [] if source == target else [f"{source} -> {target}".replace("torch.", "")]


def _places(checkpoint: HFCheckpoint, binding: Binding) -> list[tuple[Place, ...]]:
    """Of every claim of the model: where `checkpoint` keeps its HF tensors."""
    files, used = checkpoint.files, set[str]()
    missing, twice, places = [], [], []
    for claim in binding.claims:
        row = []
        for tensor in claim.hf:
            options = [Place(tensor, name, tensor.shape) for name in (tensor.name, *tensor.other_names)]
            stacked = tensor.stacked
            if stacked is not None:
                kept = [] if stacked.only else options
                options = [*kept, Place(tensor, stacked.name, stacked.shape, claim.expert)]
            present = [place for place in options if place.name in files]
            if not present:
                missing.append(tensor.exported[0])
            elif len(present) > 1:
                twice.append(" and ".join(place.name for place in present))
            used.update(place.name for place in present)
            used.update(tensor.held_again)
            row += present[:1]
        places.append(tuple(row))
    family = binding.family
    known = re.compile("|".join((*family.ignored, *binding.carried)) or r"(?!)")
    extra = [name for name in sorted(files) if name not in used and not known.fullmatch(name)]
    problems = {"missing": dict.fromkeys(missing), "of no rule": extra, "written twice": twice}
    if any(problems.values()):
        found = "; ".join(f"tensors {kind}: {listing(names)}" for kind, names in problems.items() if names)
        raise ValueError(
            f"{checkpoint.directory} does not match its config.json (model_type {binding.family.model_type}): {found}. "
            "Take weights and config.json from one folder of a causal language model"
        )
    return places


def _check_shapes(checkpoint: HFCheckpoint, bound: Sequence[Bound], places: Sequence[tuple[Place, ...]]) -> None:
    wrong = []
    for place in dict.fromkeys(place for entry in bound for place in places[entry.claim.index]):
        names = (place.name, *(name for name in place.tensor.held_again if name in checkpoint.files))
        for name in names:
            checkpoint.dtype(name)
            if checkpoint.shape(name) != place.shape:
                wrong.append(f"{name} is {list(checkpoint.shape(name))}, expected {list(place.shape)}")
    if wrong:
        raise ValueError(f"{checkpoint.directory} does not match its config.json: {listing(dict.fromkeys(wrong))}")
