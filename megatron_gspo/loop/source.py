"""Where a step's batch comes from: sampled now, replayed from records, or responses that the data gives (sft)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_gspo.batch.record import read_index, read_rows
from megatron_gspo.batch.trajectory import Trajectories, TrajectoryIndex
from megatron_gspo.config import BatchConfig, Recipe
from megatron_gspo.loop.given import given_batch
from megatron_gspo.loop.sampling import SamplerHandle


class Batch(Protocol):
    """One step's trajectories: the index that every rank knows, and the rows that this rank trains."""

    index: TrajectoryIndex
    record: Path | None

    def rows(self, rows: Sequence[int]) -> Trajectories:
        """Token-level data of `rows`."""


class RecordedBatch:
    """A batch on disk; a rank reads only its own rows."""

    def __init__(self, record: Path):
        self.record: Path | None = record
        self.index = read_index(record)

    def rows(self, rows: Sequence[int]) -> Trajectories:
        assert self.record is not None
        return read_rows(self.record, rows)


class GivenBatch:
    """A batch of given responses, made by each rank from the same data."""

    record: Path | None = None

    def __init__(self, index: TrajectoryIndex, trajectories: Trajectories):
        self.index = index
        self._trajectories = trajectories

    def rows(self, rows: Sequence[int]) -> Trajectories:
        return self._trajectories.select(rows)


class BatchSource(Protocol):
    """Gives the batch of a step, or None when the run is asked to stop while waiting. Collective over all ranks."""

    def fetch(self, step: int, weight_version: int) -> Batch | None: ...


def record_path(directory: Path, step: int) -> Path:
    """Folder of the record of `step`."""
    return directory / f"step_{step:06d}"


HEARTBEAT_S = 10.0
_PENDING, _DONE, _STOPPED = range(3)


class SampledBatches:
    """Batches from the sampling process; rank 0 speaks to it, every rank reads the record."""

    def __init__(self, sampler: SamplerHandle | None, directory: Path, group: dist.ProcessGroup, expired: Callable):
        self._sampler = sampler
        self._directory = directory
        self._group = group
        self._expired = expired

    def fetch(self, step: int, weight_version: int) -> Batch | None:
        path = record_path(self._directory, step)
        # A record that is there already is of this very step, left by the run that is resumed: it is trained again.
        if self._sampler is not None and not path.exists():
            self._sampler.request(step, weight_version, path)
        while True:
            state = torch.tensor([self._look(path)])
            dist.broadcast(state, 0, group=self._group)
            if state.item() != _PENDING:
                return RecordedBatch(path) if state.item() == _DONE else None

    def _look(self, path: Path) -> int:
        """What rank 0 tells the others. Often enough that their wait never looks like a rank that does not come."""
        if self._sampler is None or path.exists():
            return _DONE
        if self._sampler.wait_recorded(HEARTBEAT_S, self._expired):
            return _DONE
        return _STOPPED if self._expired() else _PENDING


class ReplayedBatches:
    """Batches recorded by an earlier run, which must have been as large as the recipe's."""

    def __init__(self, directory: Path, config: BatchConfig):
        self._directory = directory
        self._config = config

    def fetch(self, step: int, weight_version: int) -> Batch | None:
        path = record_path(self._directory, step)
        batch = RecordedBatch(path)
        found = (batch.index.n, len(batch.index.group.unique()))
        if found != (self._config.prompts * self._config.samples, self._config.prompts):
            raise ValueError(
                f"rollout.replay: {path} holds {found[0]} trajectories of {found[1]} prompts, but batch.prompts = "
                f"{self._config.prompts} and batch.samples = {self._config.samples}; set them to what was recorded"
            )
        return batch


class GivenBatches:
    """Supervised batches: prompts with the responses that the data gives."""

    def __init__(self, recipe: Recipe, stop: Callable[[], bool], on_stat: Callable[[str, float], None]):
        """stop: whether the run is asked to stop; a collective, which all ranks call at the same prompts."""
        self._make = given_batch(recipe)
        self._stop = stop
        self._on_stat = on_stat

    def fetch(self, step: int, weight_version: int) -> Batch | None:
        given = self._make(step, self._stop)
        if given is None:
            return None
        self._on_stat("data/dropped_prompts", float(given.dropped))
        return GivenBatch(given.index, given.trajectories)
