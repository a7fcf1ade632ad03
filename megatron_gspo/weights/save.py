"""A complete HF checkpoint out of any layout, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_gspo.weights.export import Bucket, ExportPlan, buckets, gather
from megatron_gspo.weights.source import INDEX

CONFIG = "config.json"
CARRIED = (  # what a checkpoint holds besides weights and config.json
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


def save_hf(directory: str | Path, plan: ExportPlan, source_dir: str | Path, size_bytes: int = 2 * 1024**3) -> None:
    """Writes the model as an HF checkpoint into `directory`, with config, tokenizer and chat template of `source_dir`.

    Collective over the world; `directory` must be on a file system that all ranks share. Every sender of the plan
    writes shards of at most `size_bytes` itself. All is written beside `directory` and renamed at the end, so the
    directory appears complete or not at all. Raises RuntimeError on every rank when one of them fails, also for a
    `directory` that exists and is not empty.
    """
    target, rank = Path(directory), dist.get_rank()
    unfinished = target.with_name(f".{target.name}.unfinished")
    sequence = buckets(plan, size_bytes)
    files = [f"model-{number:05d}-of-{len(sequence):05d}.safetensors" for number in range(1, len(sequence) + 1)]
    try:
        _agree(_attempt(partial(_prepare, target, unfinished)) if rank == 0 else None)
        _agree(_write_shards(unfinished, sequence, files))
        finish = partial(_finish, unfinished, target, plan, sequence, files, Path(source_dir))
        _agree(_attempt(finish) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def _attempt(step: Callable[[], None]) -> str | None:
    """Runs a step that may fail on this rank alone; the others must hear of it rather than wait for it."""
    try:
        step()
    except Exception as error:
        return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return None


def _agree(error: str | None) -> None:
    """Every rank raises if one has an error. Collective over the world."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        raise RuntimeError("export of the HF checkpoint failed on " + "; ".join(e for e in errors if e is not None))


def _prepare(target: Path, unfinished: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is not an empty directory; remove it or export elsewhere")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _write_shards(unfinished: Path, sequence: Sequence[Bucket], files: Sequence[str]) -> str | None:
    """After an error this rank writes no more, but still joins the gathers that its peers are in."""
    error = None
    for bucket, file in zip(sequence, files, strict=True):
        tensors = dict(gather(bucket))
        if tensors and error is None:
            error = _attempt(partial(_write_shard, unfinished / file, tensors))
    return error


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _fsync(path)


def _finish(
    unfinished: Path, target: Path, plan: ExportPlan, sequence: Sequence[Bucket], files: Sequence[str], source: Path
) -> None:
    weight_map = {t.name: file for bucket, file in zip(sequence, files, strict=True) for t in bucket.tensors}
    total_size = sum(tensor.size_bytes for tensor in plan.tensors)
    _write_json(unfinished / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    _write_json(unfinished / CONFIG, _config(source, {tensor.dtype for tensor in plan.tensors}))
    for path in sorted({path for pattern in CARRIED for path in source.glob(pattern)}):
        shutil.copyfile(path, unfinished / path.name)
        _fsync(unfinished / path.name)
    absent = [file for file in files if not (unfinished / file).exists()]
    if absent:
        raise FileNotFoundError(f"{unfinished} lacks {', '.join(absent)}; is it on a file system that all ranks share?")
    _fsync(unfinished)
    os.replace(unfinished, target)
    _fsync(target.parent)


def _config(source: Path, dtypes: set[torch.dtype]) -> dict:
    """The source's config.json; its dtype follows the weights where these have one dtype."""
    config = json.loads((source / CONFIG).read_text())
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(*dtypes).removeprefix("torch.")
    return config


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
