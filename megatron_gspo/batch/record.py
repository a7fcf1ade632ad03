"""A rollout batch on disk, whole or not at all: `batch.safetensors` (every array) and `samples.jsonl` (for people).

A rank reads only the byte ranges of its own rows. Arrays are those of `TrajectoryIndex` (extra reward metrics as
`metrics.NAME`) and of `Trajectories`, whose rows stand in order, 0 to n-1.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gspo.batch.trajectory import Trajectories, TrajectoryIndex

ARRAYS = "batch.safetensors"
SAMPLES = "samples.jsonl"
_METRIC = "metrics."
_INDEX = [f.name for f in fields(TrajectoryIndex) if f.name != "metrics"]
_PER_TOKEN = ["tokens", "loss_mask", "logprobs", "versions"]


def write_record(
    directory: Path, index: TrajectoryIndex, trajectories: Trajectories, samples: Iterable[Mapping[str, Any]]
) -> None:
    """Write all n rows of a batch; a crash at any point leaves no `directory`, or all of it.

    samples: one JSON-able mapping per line of samples.jsonl. Raises FileExistsError if `directory` exists.
    """
    whole = trajectories.select(range(index.n))
    if not torch.equal(whole.offsets.diff(), index.lens):
        raise ValueError(f"{directory}: lengths of the index and of the trajectories differ, so nothing was written")
    arrays = {name: getattr(index, name) for name in _INDEX}
    arrays |= {_METRIC + name: values for name, values in index.metrics.items()}
    arrays |= {name: getattr(whole, name) for name in ["offsets", *_PER_TOKEN]}
    if directory.exists():
        raise FileExistsError(f"{directory} holds a record already; remove it to record this batch again")

    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir(parents=True)
    try:
        # safetensors refuses arrays that share memory, as trained_lens and response_lens well may.
        save_file({name: array.clone() for name, array in arrays.items()}, partial / ARRAYS)
        with (partial / SAMPLES).open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        for path in (partial / ARRAYS, partial / SAMPLES, partial):
            _sync(path)
        partial.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_index(directory: Path) -> TrajectoryIndex:
    """What every rank knows of the recorded batch."""
    with _open(directory) as arrays:
        metrics = {name: arrays.get_tensor(name) for name in arrays.keys() if name.startswith(_METRIC)}  # noqa: SIM118
        return TrajectoryIndex(
            **{name: arrays.get_tensor(name) for name in _INDEX},
            metrics={name.removeprefix(_METRIC): values for name, values in metrics.items()},
        )


def read_rows(directory: Path, rows: Sequence[int]) -> Trajectories:
    """The given rows, in the given order, reading no others. Raises ValueError naming the file and a row it lacks."""
    with _open(directory) as arrays:
        bounds = arrays.get_tensor("offsets").tolist()
        absent = [row for row in rows if not 0 <= row < len(bounds) - 1]
        if absent:
            raise ValueError(f"{directory / ARRAYS} has rows 0 to {len(bounds) - 2}, not {absent}")
        spans = [(bounds[row], bounds[row + 1]) for row in rows]

        def packed(name: str) -> Tensor:
            array = arrays.get_slice(name)
            return torch.cat([array[:0], *(array[start:end] for start, end in spans)])

        return Trajectories(
            rows=torch.tensor(rows, dtype=torch.int64),
            offsets=torch.tensor([0, *(end - start for start, end in spans)], dtype=torch.int64).cumsum(0),
            tokens=packed("tokens"),
            loss_mask=packed("loss_mask"),
            logprobs=packed("logprobs"),
            versions=packed("versions"),
        )


@contextmanager
def _open(directory: Path) -> Iterator[Any]:
    path = directory / ARRAYS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {directory} is not a recorded batch")
    try:
        with safe_open(path, framework="pt") as arrays:
            yield arrays
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a recorded batch ({error}); sample this batch again") from error


def _sync(path: Path) -> None:
    """Make a file's or a directory's content survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
