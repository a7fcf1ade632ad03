"""Several tensors as one run of bytes: the layout of SGLang's `load_format: flattened_bucket`.

Format: `FlattenedTensorBucket` in `sglang/srt/weight_sync/tensor_bucket.py` of sglang 0.5.23: the raw bytes of the
tensors, one after the other without gaps; names, dtypes and shapes travel beside it. Each tensor starts at a multiple
of its item size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Spec(Protocol):
    """One HF tensor as it is sent."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Bucket(Protocol):
    """Tensors that one trainer rank sends in one broadcast."""

    @property
    def sender(self) -> int: ...
    @property
    def tensors(self) -> Sequence[Spec]: ...


def flatten(bucket: Bucket, tensors: Sequence[tuple[str, Tensor]]) -> Tensor:
    """The bytes of `tensors`, uint8 [size], on their device. Raises ValueError where they are not what `bucket`
    announces."""
    announced = [(spec.name, tuple(spec.shape), spec.dtype) for spec in bucket.tensors]
    gathered = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    if announced != gathered:
        wrong = next((pair for pair in zip(announced, gathered, strict=False) if pair[0] != pair[1]), None)
        raise ValueError(
            f"the bucket of rank {bucket.sender} announces {len(announced)} tensors and {len(gathered)} were gathered; "
            f"first difference: {wrong}"
        )
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])


def describe(bucket: Bucket) -> dict[str, list]:
    """Names, dtypes and shapes as `/update_weights_from_distributed` takes them. Raises ValueError for a tensor that
    would not start at a multiple of its item size (fewer bytes than its dtype needs before it)."""
    start = 0
    for spec in bucket.tensors:
        if start % spec.dtype.itemsize:
            raise ValueError(
                f"{spec.name} ({spec.dtype}) would start at byte {start} of its bucket: put tensors of larger items "
                "first, or tensors of one dtype into a bucket"
            )
        start += prod(spec.shape) * spec.dtype.itemsize
    return {
        "names": [spec.name for spec in bucket.tensors],
        "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in bucket.tensors],
        "shapes": [list(spec.shape) for spec in bucket.tensors],
    }


def check_coverage(buckets: Sequence[Bucket], expected: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless the buckets hold exactly the `expected` tensors (HF name to shape), each once: SGLang
    accepts unknown names silently and keeps the old value of a missing one."""
    specs = [spec for bucket in buckets for spec in bucket.tensors]
    counts = Counter(spec.name for spec in specs)
    problems = {
        "sent twice": [name for name, count in counts.items() if count > 1],
        "not in the model": [name for name in counts if name not in expected],
        "missing": [name for name in expected if name not in counts],
        "of another shape": [
            f"{spec.name} {list(spec.shape)} instead of {list(expected[spec.name])}"
            for spec in specs
            if spec.name in expected and tuple(spec.shape) != tuple(expected[spec.name])
        ],
    }
    lines = [f"{len(names)} {what}: {', '.join(names[:5])}" for what, names in problems.items() if names]
    if lines:
        raise ValueError(f"the weights to send are not the model's: {'; '.join(lines)}")
