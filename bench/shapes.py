"""Two shapes of rollout batches with fixed tokens, recorded as a run records its own, for both sides to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megatron_gspo.batch.record import write_record
from megatron_gspo.batch.trajectory import Trajectories, TrajectoryIndex
from megatron_gspo.loop.given import assemble
from megatron_gspo.loop.source import record_path

PROMPT_TOKENS = 9  # eight digits and `>`, as in the demo
FIRST_BYTE = 4  # of the demo tokenizer: the special tokens come first
LAST_BYTE = FIRST_BYTE + 255


@dataclass(frozen=True)
class Shape:
    """A batch of `prompts` x `samples` responses; `draw_lens(generator, n)` gives their lengths in tokens."""

    name: str
    prompts: int
    samples: int
    longest: int
    draw_lens: Callable[[np.random.Generator, int], np.ndarray]

    @property
    def n(self) -> int:
        """Number of responses."""
        return self.prompts * self.samples

    def response_lens(self, seed: int) -> np.ndarray:
        """[n] int64, between 1 and `longest`."""
        lens = self.draw_lens(np.random.default_rng(seed), self.n)
        return np.clip(lens, 1, self.longest).astype(np.int64)


SHORT = Shape("short", prompts=32, samples=16, longest=16, draw_lens=lambda rng, n: rng.integers(14, 17, n))
RAGGED = Shape(
    "ragged", prompts=16, samples=16, longest=256, draw_lens=lambda rng, n: rng.lognormal(np.log(72), 0.75, n)
)


def make_batch(shape: Shape, seed: int) -> tuple[TrajectoryIndex, Trajectories]:
    """Random bytes as prompts and responses, random rewards. The rollout log-probabilities are 0: a run then reports
    the mean of -logp as `policy/logp_diff`."""
    rng = np.random.default_rng((1, seed))
    prompts = rng.integers(FIRST_BYTE, LAST_BYTE + 1, (shape.prompts, PROMPT_TOKENS)).repeat(shape.samples, axis=0)
    responses = [rng.integers(FIRST_BYTE, LAST_BYTE + 1, length) for length in shape.response_lens(seed)]
    index, trajectories = assemble(list(torch.from_numpy(prompts)), [torch.from_numpy(ids) for ids in responses])
    group = torch.arange(shape.prompts).repeat_interleave(shape.samples)
    return replace(index, group=group, rewards=torch.from_numpy(rng.random(shape.n))), trajectories


def write_records(directory: Path, shape: Shape, steps: int) -> None:
    """One record a step under the names that `rollout.replay` expects."""
    for step in range(steps):
        write_record(record_path(directory, step), *make_batch(shape, seed=step), samples=[])


def padding_share(shape: Shape, steps: int) -> float:
    """Share of completion positions that hold no token when responses are padded to the longest of their batch."""
    lens = [shape.response_lens(step) for step in range(steps)]
    return 1 - sum(each.sum() for each in lens) / sum(each.max() * len(each) for each in lens)
