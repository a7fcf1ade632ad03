"""A complete HF checkpoint out of any layout, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from megatron_gspo.weights.export import Bucket, ExportPlan, buckets, gather, parts
from megatron_gspo.weights.hf_folder import SHARD_BYTES, Shard, write_hf
from megatron_gspo.weights.safetensors_file import Spec
from megatron_gspo.weights.source import HFCheckpoint

GATHER_BYTES = 64 * 1024**2  # enough that small tensors share a collective


def save_hf(directory: str | Path, plan: ExportPlan, source_dir: str | Path, size_bytes: int = SHARD_BYTES) -> None:
    """Writes the model as an HF checkpoint into `directory`, with config, tokenizer and chat template of `source_dir`
    and the tensors of `source_dir` that no model holds (multi-token-prediction layers).

    Collective over the world; `directory` must be on a file system that all ranks share. Every sender of the plan
    writes shards of at most `size_bytes` itself, gathered in lots of 64 MiB: memory holds two of them, or two of the
    largest tensor. All is written beside `directory` and renamed at the end, so the directory appears complete or not
    at all. Raises RuntimeError on every rank when one of them fails, also for a `directory` that exists and is not
    empty.
    """
    with HFCheckpoint(source_dir) as source:
        shards = [
            Shard(
                bucket.sender, tuple(Spec(t.name, t.dtype, t.shape) for t in bucket.tensors), partial(_stream, bucket)
            )
            for bucket in buckets(plan, size_bytes)
        ]
        write_hf(directory, source, plan.binding, shards)


def _stream(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts(bucket, GATHER_BYTES):
        yield from gather(part)
