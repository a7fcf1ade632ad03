"""An HF checkpoint as a folder: shards streamed tensor by tensor, their index, config.json, tokenizer, and the tensors
that no model holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.weights.bind import Binding
from megatron_gspo.weights.forms import Form
from megatron_gspo.weights.output import agree, attempt, copy_file, whole_folder, write_json
from megatron_gspo.weights.safetensors_file import SafetensorsWriter, Spec
from megatron_gspo.weights.source import CONFIG, INDEX, HFCheckpoint, read_json

CARRIED_FILES = (  # what a checkpoint holds besides weights and config.json
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
CARRIED = "carried.safetensors"
FAILED = "writing the HF checkpoint"
SHARD_BYTES = 2 * 1024**3
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Shard:
    """One file: `rank` writes `tensors` into it. Every rank runs `stream()`, which yields them, one by one and in any
    order, on `rank` and nothing elsewhere; it may hold collectives."""

    rank: int
    tensors: tuple[Spec, ...]
    stream: Callable[[], Tensors]


def write_hf(
    directory: str | Path,
    source: HFCheckpoint,
    binding: Binding,
    shards: Sequence[Shard],
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Writes `shards`, and from `source` config.json, tokenizer and carried tensors, into `directory`. Collective.

    Tensors that `source` holds under a second name as well (`HFTensor.repeats`) are written under it too.

    `quantization` becomes config.json's quantization_config; None drops that of `source`, and tensors that it carries
    in codes are decoded to the dtype of the others. All is written beside `directory` and renamed at the end. Memory
    holds one tensor at a time. Raises RuntimeError on every rank when one of them fails.
    """
    dtype = _dtype(shards)
    shards = [_with_repeats(shard, _repeats(source, binding)) for shard in shards]
    shards = [*shards, *_carried_shards(source, binding, dtype, keep_codes=quantization is not None)]
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {spec.name: file for shard, file in zip(shards, files, strict=True) for spec in shard.tensors}
    total = sum(spec.size_bytes for shard in shards for spec in shard.tensors)
    with whole_folder(Path(directory), total, FAILED) as folder:
        error = None
        for shard, file in zip(shards, files, strict=True):
            stream = shard.stream()
            if shard.rank == dist.get_rank() and error is None:
                error = attempt(partial(_write_shard, folder / file, shard.tensors, stream))
            for _ in stream:  # ranks that do not write, or no more, still join the collectives of those that do
                pass
        agree(error, FAILED)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        config = _config(source.directory, dtype, quantization)
        finish = partial(_write_others, folder, source.directory, index, config, files)
        agree(attempt(finish) if dist.get_rank() == 0 else None, FAILED)


def carried_names(source: HFCheckpoint, binding: Binding) -> list[str]:
    """Tensors of `source` that no model holds and that exports hand on."""
    known = re.compile("|".join(binding.carried) or r"(?!)")
    return [name for name in sorted(source.files) if known.fullmatch(name)]


def write_carried(folder: Path, source: HFCheckpoint, binding: Binding) -> None:
    """Makes `folder` with all of `source` but the model's own weights: config.json, tokenizer, generation config, and
    the carried tensors bit for bit in the file CARRIED. Not a collective."""
    folder.mkdir()
    copy_file(source.directory / CONFIG, folder / CONFIG)
    copy_others(source.directory, folder)
    parts = {part: form for name in carried_names(source, binding) for part, form in source.parts(name).items()}
    specs = [Spec(part, form.dtype, form.shape) for part, form in parts.items()]
    with SafetensorsWriter(folder / CARRIED, specs) as writer:
        for part, tensor in _read_all(parts):
            writer.write(part, tensor)


def _read_all(parts: Mapping[str, Form]) -> Tensors:
    for part, form in parts.items():
        tensor = torch.empty(form.shape, dtype=form.dtype)
        form.read_into((), tensor)
        yield part, tensor


def copy_others(source: Path, target: Path) -> None:
    """Tokenizer, generation config and chat template."""
    for path in sorted({path for pattern in CARRIED_FILES for path in source.glob(pattern)}):
        copy_file(path, target / path.name)


def _write_shard(path: Path, tensors: Sequence[Spec], stream: Tensors) -> None:
    with SafetensorsWriter(path, tensors) as writer:
        for name, tensor in stream:
            writer.write(name, tensor)


def _write_others(folder: Path, source: Path, index: dict, config: dict, files: Sequence[str]) -> None:
    write_json(folder / INDEX, index)
    write_json(folder / CONFIG, config)
    copy_others(source, folder)
    absent = [file for file in files if not (folder / file).exists()]
    if absent:
        raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}; is it on a file system that all ranks share?")


def _carried_shards(source: HFCheckpoint, binding: Binding, dtype: torch.dtype, *, keep_codes: bool) -> list[Shard]:
    """Bit for bit, but for codes that the config of the new checkpoint would not explain."""
    lots, filled = list[list[tuple[Spec, Form]]](), 0
    for name in carried_names(source, binding):
        if source.is_plain(name) or keep_codes:
            found = [(Spec(part, form.dtype, form.shape), form) for part, form in source.parts(name).items()]
        else:
            found = [(Spec(name, dtype, source.shape(name)), source.form(name))]
        size = sum(spec.size_bytes for spec, _ in found)
        if not lots or filled + size > SHARD_BYTES:
            lots.append([])
            filled = 0
        lots[-1] += found
        filled += size
    world = dist.get_world_size()
    return [
        Shard(number % world, tuple(spec for spec, _ in lot), partial(_carried, lot, number % world))
        for number, lot in enumerate(lots)
    ]


def _carried(lot: Sequence[tuple[Spec, Form]], rank: int) -> Tensors:
    if dist.get_rank() == rank:
        for spec, form in lot:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            form.read_into((), tensor)
            yield spec.name, tensor


def _repeats(source: HFCheckpoint, binding: Binding) -> dict[str, list[str]]:
    """Of every tensor that `source` repeats: under which names."""
    tensors = (tensor for claim in binding.claims for tensor in claim.hf if tensor.repeats)
    return {tensor.name: [name for name in tensor.repeats if name in source.files] for tensor in tensors}


def _with_repeats(shard: Shard, repeats: Mapping[str, Sequence[str]]) -> Shard:
    again = [replace(spec, name=name) for spec in shard.tensors for name in repeats.get(spec.name, ())]

    def stream() -> Tensors:
        for name, tensor in shard.stream():
            yield name, tensor
            for other in repeats.get(name, ()):
                yield other, tensor

    return Shard(shard.rank, (*shard.tensors, *again), stream)


def _dtype(shards: Sequence[Shard]) -> torch.dtype:
    """The dtype of most of the weights that are no codes."""
    sizes: Counter[torch.dtype] = Counter()
    for shard in shards:
        for spec in shard.tensors:
            if spec.dtype.itemsize > 1 and not spec.name.endswith("_scale_inv"):
                sizes[spec.dtype] += spec.size_bytes
    return sizes.most_common(1)[0][0]


def _config(source: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None) -> dict:
    """The source's config.json with the dtype and the quantisation of the weights beside it."""
    config = read_json(source / CONFIG, "an object")
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    return config
