"""Prompts to trajectories: every prompt's group of responses, rewarded as it arrives."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gspo.batch.trajectory import Finish, Trajectories, TrajectoryIndex
from megatron_gspo.config.schema import OnRewardError
from megatron_gspo.rollout.client import Sample, Sampling, SglangClient
from megatron_gspo.rollout.control import ServerError

ABORT_RETRIES = 3

Reward = Callable[[int, Sample], Awaitable[Mapping[str, float]]]
"""Prompt number and response to {"reward": value, further metrics}."""

Progress = Callable[[int, int], None]
"""Finished and all responses of the batch."""

Shape = Callable[[Mapping[str, float], Sample], Mapping[str, float]]
"""What a response's length makes of its reward and metrics."""

Replace = Callable[[int, int], Sequence[int]]
"""Prompt number and attempt (from 1) to the token ids of the prompt that takes its place."""


@dataclass(frozen=True)
class RewardFailure:
    """A reward that raised: number of the prompt in the batch, of the response in its group, and the traceback."""

    prompt: int
    response: int
    trace: str


@dataclass(frozen=True)
class Rollout:
    """A sampled batch. Row i is response i % n of prompt i // n. `discarded` groups had equal rewards."""

    index: TrajectoryIndex
    trajectories: Trajectories
    failures: tuple[RewardFailure, ...]
    discarded: int


async def sample_batch(
    client: SglangClient,
    prompts: Sequence[Sequence[int]],
    reward: Reward,
    sampling: Sampling,
    *,
    n: int,
    name: str,
    reward_concurrency: int,
    on_reward_error: OnRewardError,
    on_progress: Progress = lambda done, total: None,
    shape: Shape = lambda scores, sample: scores,
    replace: Replace | None = None,
    max_attempts: int = 1,
    train_cut_short: bool = True,
) -> Rollout:
    """Sample `n` responses to each prompt (token ids) and reward them; requests are called `name`-PROMPT.

    At most `reward_concurrency` rewards are computed at once. With `OnRewardError.zero` a reward that raises is worth
    0 and listed in `failures`; otherwise its exception ends the batch. Raises what `SglangClient.generate` raises,
    and ServerError for a response that the server aborts again and again.

    With `replace`, a group with equal rewards is discarded and another prompt takes its place, up to `max_attempts`
    prompts for one place; the last one stays. `shape` is applied to the rewards of groups that stay. Unless
    `train_cut_short`, responses at the token limit train on nothing.
    """
    slots = asyncio.Semaphore(reward_concurrency)
    failures: list[RewardFailure] = []
    done = discarded = 0
    asked = list(prompts)

    async def rewarded(prompt: int, response: int, sample: Sample) -> Mapping[str, float]:
        async with slots:
            try:
                return await reward(prompt, sample)
            except Exception:
                if on_reward_error is OnRewardError.stop:
                    raise
                failures.append(RewardFailure(prompt, response, traceback.format_exc()))
                return {"reward": 0.0}

    async def group(number: int) -> list[tuple[Sample, Mapping[str, float]]]:
        nonlocal done, discarded
        for attempt in range(max_attempts):
            if attempt and replace:
                discarded += 1
                asked[number] = replace(number, attempt)
            samples = await _sample_group(client, asked[number], sampling, n, f"{name}-{number}-{attempt}")
            rewards = await asyncio.gather(*(rewarded(number, i, sample) for i, sample in enumerate(samples)))
            if replace is None or len({each["reward"] for each in rewards}) > 1:
                break
        done += n
        on_progress(done, n * len(prompts))
        return [(sample, shape(scores, sample)) for sample, scores in zip(samples, rewards, strict=True)]

    async with asyncio.TaskGroup() as tasks:  # one failure cancels the others
        groups = [tasks.create_task(group(number)) for number in range(len(prompts))]
    rows = [pair for task in groups for pair in task.result()]
    samples, rewards = [sample for sample, _ in rows], [reward for _, reward in rows]
    return Rollout(
        index=make_index(asked, samples, rewards, train_cut_short=train_cut_short),
        trajectories=make_trajectories(asked, samples, train_cut_short=train_cut_short),
        failures=tuple(failures),
        discarded=discarded,
    )


async def _sample_group(
    client: SglangClient, prompt: Sequence[int], sampling: Sampling, n: int, name: str
) -> list[Sample]:
    """`n` whole responses: those that the server aborted are sampled anew."""
    samples: list[Sample] = []
    for attempt in range(ABORT_RETRIES + 1):
        fresh = await client.generate(prompt, sampling, n=n - len(samples), rid=f"{name}-{attempt}")
        samples += [sample for sample in fresh if sample.finish is not Finish.abort]
        if len(samples) == n:
            return samples
    raise ServerError(
        f"request {name}: the server aborted {n - len(samples)} of {n} responses {ABORT_RETRIES + 1} times"
    )


def make_index(
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    rewards: Sequence[Mapping[str, float]],
    *,
    train_cut_short: bool = True,
) -> TrajectoryIndex:
    """The index of a batch of `len(samples)` rows, the same number per prompt, in prompt order. A metric that a reward
    did not report is NaN."""
    n = len(samples) // len(prompts)
    lens = torch.tensor([len(sample.output_ids) for sample in samples], dtype=torch.int64)
    names = sorted({name for each in rewards for name in each} - {"reward"})

    def column(name: str) -> Tensor:
        return torch.tensor([each.get(name, float("nan")) for each in rewards], dtype=torch.float64)

    return TrajectoryIndex(
        prompt_lens=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64).repeat_interleave(n),
        response_lens=lens,
        trained_lens=torch.where(_trains(samples, train_cut_short), lens, 0),
        group=torch.arange(len(prompts)).repeat_interleave(n),
        rewards=torch.tensor([each["reward"] for each in rewards], dtype=torch.float64),
        finish=torch.tensor([sample.finish for sample in samples], dtype=torch.uint8),
        metrics={name: column(name) for name in names},
    )


def make_trajectories(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sample], *, train_cut_short: bool = True
) -> Trajectories:
    """The tokens of a batch, its rows as in `make_index`."""
    n = len(samples) // len(prompts)
    heads = [torch.tensor(prompts[row // n], dtype=torch.int64) for row in range(len(samples))]
    lens = [len(head) + len(sample.output_ids) for head, sample in zip(heads, samples, strict=True)]
    trains = zip(samples, _trains(samples, train_cut_short), strict=True)

    def packed(prompt_value: Tensor, values: Sequence[Tensor]) -> Tensor:
        pieces = zip(heads, values, strict=True)
        return torch.cat([piece for head, value in pieces for piece in (prompt_value.expand(len(head)), value)])

    return Trajectories(
        rows=torch.arange(len(samples)),
        offsets=torch.tensor([0, *lens], dtype=torch.int64).cumsum(0),
        tokens=torch.cat([piece for head, s in zip(heads, samples, strict=True) for piece in (head, s.output_ids)]),
        loss_mask=packed(torch.tensor(False), [mask.expand(len(s.output_ids)) for s, mask in trains]),
        logprobs=packed(torch.tensor(0.0), [s.logprobs for s in samples]),
        versions=packed(torch.tensor(-1), [s.versions for s in samples]),
    )


def _trains(samples: Sequence[Sample], train_cut_short: bool) -> Tensor:
    """[n] bool: whether the tokens of each response train; all or none of them do."""
    return torch.tensor([train_cut_short or sample.finish is not Finish.length for sample in samples])
