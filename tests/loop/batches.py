"""Recorded batches for tests of the loop: ragged, with holes, and with plausible log-probabilities of an engine."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from megatron_gspo.batch.record import write_record
from megatron_gspo.loop.given import assemble
from megatron_gspo.loop.source import GivenBatch

PROMPTS, SAMPLES, VOCABULARY = 6, 4, 96


def make_batch(seed: int = 5) -> GivenBatch:
    """Ragged trajectories with holes in their loss masks; one trains on nothing, and one group has equal rewards."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator)

    n = PROMPTS * SAMPLES
    index, trajectories = assemble([tokens(2, 9) for _ in range(n)], [tokens(1, 40) for _ in range(n)])
    mask = trajectories.loss_mask & (torch.rand(len(trajectories.tokens), generator=generator) > 0.2)
    mask[int(trajectories.offsets[3]) : int(trajectories.offsets[4])] = False
    spans = zip(trajectories.offsets[:-1].tolist(), trajectories.offsets[1:].tolist(), strict=True)
    trained = torch.tensor([int(mask[start:end].sum()) for start, end in spans])
    rewards = torch.rand(n, generator=generator, dtype=torch.float64)
    rewards[:SAMPLES] = 0.25
    index = replace(index, trained_lens=trained, group=torch.arange(n) // SAMPLES, rewards=rewards)
    # A random policy gives every token about 1 / VOCABULARY: a mean log-probability lower than that of 1 / VOCABULARY.
    noise = 0.2 * torch.randn(len(trajectories.tokens), generator=generator)
    logprobs = torch.where(mask, noise - math.log(VOCABULARY) - 0.5, 0.0)
    return GivenBatch(index, replace(trajectories, loss_mask=mask, logprobs=logprobs))


def untrained(batch: GivenBatch) -> GivenBatch:
    """The same, with every response token masked."""
    index, trajectories = batch.index, batch.rows(range(batch.index.n))
    return GivenBatch(
        replace(index, trained_lens=torch.zeros_like(index.trained_lens)),
        replace(trajectories, loss_mask=torch.zeros_like(trajectories.loss_mask)),
    )


def write_records(directory: Path, steps: int, masked: Collection[int] = ()) -> Path:
    """Rollouts of an earlier run, one record a step, as `rollout.replay` takes them. Those `masked` train nothing."""
    for step in range(steps):
        batch = make_batch(seed=5 + step)
        batch = untrained(batch) if step in masked else batch
        rows = range(batch.index.n)
        write_record(directory / f"step_{step:06d}", batch.index, batch.rows(rows), [{"row": row} for row in rows])
    return directory
