"""A Megatron distributed checkpoint, of any layout and of training or not, as an HF checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.convert.dcp_read import Chunk, MegatronCheckpoint, Overlap
from megatron_gspo.convert.skeleton import Entry, Region, Skeleton, skeleton
from megatron_gspo.convert.to_megatron import HF_FOLDER
from megatron_gspo.convert.world import Progress, ahead, shares
from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.export import assemble
from megatron_gspo.weights.hf_folder import CARRIED, SHARD_BYTES, Shard, write_hf
from megatron_gspo.weights.plan import in_lots
from megatron_gspo.weights.quantize import BLOCK, quantize, scale_shape
from megatron_gspo.weights.rules import Shape, Vocab
from megatron_gspo.weights.safetensors_file import Spec
from megatron_gspo.weights.source import CONFIG, SINGLE, HFCheckpoint, read_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16, "keep": None}
# State of a training run that is no weight of the model: optimizer state and RNG, under one model's prefix or several.
NO_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\..*|rng_state.*|.*\._extra_state.*")
SCALE = "_scale_inv"
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Source:
    """A parameter and the chunks of the checkpoint that hold its regions; `dtype` as stored."""

    entry: Entry
    parts: tuple[tuple[Region, tuple[Overlap, ...]], ...]
    dtype: torch.dtype

    @property
    def place(self) -> tuple[str, int]:
        """File and byte of its first number."""
        first = self.chunks[0].place
        return first.relative_path, first.offset

    @property
    def chunks(self) -> list[Chunk]:
        return [overlap.chunk for _, overlaps in self.parts for overlap in overlaps]

    def read(self, checkpoint: MegatronCheckpoint) -> torch.Tensor:
        """The whole parameter, in the dtype that is stored."""
        parameter = torch.empty(self.entry.bound.parameter.shape, dtype=self.dtype)
        for region, overlaps in self.parts:
            target = region.of(parameter)
            for overlap in overlaps:
                checkpoint.read_into(region.key, overlap, target)
        return parameter


def megatron_to_hf(
    source: Path, target: Path, *, hf: Path | None = None, dtype: str = "keep", shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes `target`; returns the bytes of its tensors. Collective over the world.

    hf: the HF checkpoint that the model came from, for config.json, tokenizer and carried tensors; None: the folder
    `hf` inside `source`. `dtype` keep: as stored; fp8: weights of linear layers in blocks of 128 x 128, all else bf16.
    Parameters that Megatron keeps in fp32 (expert biases) stay fp32. Memory holds the largest parameter twice.
    Raises ValueError naming tensors that are missing, that belong to no parameter, or whose shape is another, before
    anything is written; RuntimeError for what goes wrong while writing, on every rank: `target` then does not exist.
    """
    origin = hf_folder(source, hf)
    hf_config = read_json(origin / CONFIG, "an object")
    single = CARRIED if (origin / CARRIED).exists() else SINGLE
    with (
        MegatronCheckpoint(source) as checkpoint,
        HFCheckpoint(origin, single=single) as carried,
    ):
        model = skeleton(hf_config, checkpoint.tensors)
        lots = in_lots(items_of(sources_of(checkpoint, model), DTYPES[dtype], fp8=dtype == "fp8"), shard_bytes)
        sizes = [sum(item.size_bytes for item in lot) for lot in lots]
        owners, rank = shares(sizes), dist.get_rank()
        progress = Progress("converting", sum(n for n, owner in zip(sizes, owners, strict=True) if owner == rank))
        shards = [
            Shard(
                owner,
                tuple(spec for item in lot for spec in item.specs),
                partial(_stream, checkpoint, lot if owner == rank else (), progress),
            )
            for lot, owner in zip(lots, owners, strict=True)
        ]
        quantization = _quantization(shards) if dtype == "fp8" else None
        write_hf(target, carried, model.binding, shards, quantization)
        return sum(sizes)


def hf_folder(source: Path, hf: Path | None) -> Path:
    """The folder with config.json and tokenizer. Raises FileNotFoundError saying how to name one."""
    folder = hf or source / HF_FOLDER
    if not (folder / CONFIG).exists():
        raise FileNotFoundError(
            f"{folder / CONFIG} does not exist; name the HF checkpoint that the model came from with --hf (of a "
            "training run: its recipe's policy.hf)"
        )
    return folder


def sources_of(checkpoint: MegatronCheckpoint, model: Skeleton) -> list[Source]:
    """Where the checkpoint keeps every parameter. Raises ValueError naming tensors that are missing, that belong to no
    parameter, whose shape is not the model's, or that are there in part."""
    missing, wrong, used, sources = [], [], set[str](), []
    for entry in model.entries:
        is_vocab = isinstance(entry.bound.claim.rule, Vocab)
        for region in entry.regions:
            used.add(region.key)
            stored = checkpoint.tensors.get(region.key)
            if stored is None:
                missing.append(region.key)
            elif not _fits(stored.shape, region.global_shape, is_vocab):
                wrong.append(f"{region.key} is {list(stored.shape)}, expected {list(region.global_shape)}")
    extra = [key for key in sorted(checkpoint.tensors) if key not in used and not NO_WEIGHTS.fullmatch(key)]
    problems = {"missing": missing, "of no parameter": extra, "of another shape": wrong}
    if any(problems.values()):
        found = "; ".join(f"tensors {kind}: {listing(dict.fromkeys(n))}" for kind, n in problems.items() if n)
        raise ValueError(f"{checkpoint.directory} does not match config.json: {found}")
    for entry in model.entries:
        if isinstance(entry.bound.claim.rule, Vocab):
            for region in entry.regions:
                _check_padding(checkpoint, region)
        parts = tuple(
            (region, tuple(checkpoint.overlaps(region.key, region.offsets, region.sizes))) for region in entry.regions
        )
        (dtype,) = {checkpoint.tensors[region.key].dtype for region in entry.regions}
        sources.append(Source(entry, parts, dtype))
    return sources


def _fits(stored: Shape, expected: Shape, is_vocab: bool) -> bool:
    """A vocabulary may be padded for the layout that wrote it."""
    if is_vocab:
        return stored[0] >= expected[0] and stored[1:] == expected[1:]
    return stored == expected


def _check_padding(checkpoint: MegatronCheckpoint, region: Region) -> None:
    """Raises ValueError where rows beyond the vocabulary, which never leave, hold numbers."""
    (rows, width), (stored, _) = region.global_shape, checkpoint.tensors[region.key].shape
    if stored == rows:
        return
    padding = torch.empty(stored - rows, width, dtype=checkpoint.tensors[region.key].dtype)
    for overlap in checkpoint.overlaps(region.key, (rows, 0), (stored - rows, width)):
        checkpoint.read_into(region.key, overlap, padding)
    used = int(padding.any(1).sum())
    if used:
        raise ValueError(
            f"{checkpoint.directory}: {region.key} has {stored} rows, config.json a vocab_size of {rows}; {used} of "
            "the rows beyond are not zero, so they are words, not padding. Name the right config.json with --hf"
        )


@dataclass(frozen=True)
class Item:
    """Parameters that make up `specs` together: one, or those of all experts where these leave stacked."""

    sources: tuple[Source, ...]
    specs: tuple[Spec, ...]

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)


def items_of(sources: Sequence[Source], dtype: torch.dtype | None, *, fp8: bool) -> list[Item]:
    """What leaves together, in the order of the checkpoint's files. dtype: of all that is not fp8; None: as stored."""
    groups: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        if not source.entry.bound.is_copy:
            groups[source.entry.bound.claim.hf[0].exported[0]].append(source)
    items = [Item(tuple(group), _specs(group[0], dtype, fp8)) for group in groups.values()]
    return sorted(items, key=lambda item: item.sources[0].place)


def _specs(source: Source, dtype: torch.dtype | None, fp8: bool) -> tuple[Spec, ...]:
    specs = []
    kind = torch.float32 if source.entry.keeps_fp32 else dtype or source.dtype
    for name, shape in dict(tensor.exported for tensor in source.entry.bound.claim.hf).items():
        if fp8 and _is_linear(source.entry, name, shape):
            specs.append(Spec(name, torch.float8_e4m3fn, shape))
            specs.append(Spec(name + SCALE, torch.float32, scale_shape(shape)))
        else:
            specs.append(Spec(name, kind, shape))
    return tuple(specs)


def _is_linear(entry: Entry, name: str, shape: Shape) -> bool:
    """Whether HF's FP8 checkpoints quantise it: matrices, but for embeddings, output layer, what routes and
    what multi-token-prediction layers begin with."""
    megatron = entry.bound.name
    routes = ".router." in megatron or "gate_weight" in megatron or ".eh_proj." in megatron
    is_vocab = isinstance(entry.bound.claim.rule, Vocab)
    return len(shape) == 2 and name.endswith(".weight") and not is_vocab and not routes


def _stream(checkpoint: MegatronCheckpoint, items: Sequence[Item], progress: Progress) -> Tensors:
    for item in ahead(items, partial(_prefetch, checkpoint)):
        specs = {spec.name: spec for spec in item.specs}
        held = ((source.entry.bound.claim, [source.read(checkpoint)]) for source in item.sources)
        for name, tensor in assemble(held):
            if name + SCALE in specs:
                codes, scales = quantize(tensor)
                yield name, codes
                yield name + SCALE, scales
            else:
                yield name, tensor.to(specs[name].dtype)
        progress.add(item.size_bytes)


def _prefetch(checkpoint: MegatronCheckpoint, item: Item) -> int:
    for source in item.sources:
        for chunk in source.chunks:
            checkpoint.prefetch(chunk)
    return item.size_bytes


def _quantization(shards: Sequence[Shard]) -> dict[str, Any]:
    names = {spec.name for shard in shards for spec in shard.tensors}
    high = sorted(
        name.removesuffix(".weight") for name in names if name.endswith(".weight") and name + SCALE not in names
    )
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": high,
    }
