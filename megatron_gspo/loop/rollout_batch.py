"""What the sampling process does for one step: prompts, responses, rewards, a record on disk."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from megatron_gspo.batch.record import write_record
from megatron_gspo.config import Dtype, Recipe
from megatron_gspo.data import Prompt, make_source, tokenize
from megatron_gspo.reward import Reward, overlong_penalty, watched
from megatron_gspo.rollout.client import Sample, Sampling, SglangClient
from megatron_gspo.rollout.sampler import Rollout, sample_batch
from megatron_gspo.rollout.server import ManagedServer

Progress = Callable[[int, int], None]

SERVER_LOG = "logs/server_0.log"  # in run.dir


def start_servers(recipe: Recipe, on_cpu: bool) -> list[ManagedServer]:
    """Start the managed server of `recipe`; it loads the checkpoint that training starts from."""
    assert recipe.rollout is not None
    config = recipe.rollout.server
    if not on_cpu:  # SGLang's own choice for an fp32 checkpoint would be float16
        dtype = {Dtype.bf16: "bfloat16", Dtype.fp32: "float32"}[recipe.policy.dtype]
        config = replace(config, args={"dtype": dtype} | config.args)
    server = ManagedServer(
        recipe.policy.hf,
        config,
        log_path=Path(recipe.run.dir) / SERVER_LOG,
        on_cpu=on_cpu,
        # SGLang keeps two tokens of its context to itself, and would cut the longest responses short by them.
        context_length=recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens + 2,
    )
    server.start()
    return [server]


class BatchSampler:
    """Samples the batches of a run; it holds no state between steps, so any step can be sampled after a resume."""

    def __init__(self, recipe: Recipe):
        assert recipe.rollout is not None and recipe.reward is not None
        self._recipe = recipe
        self._rollout = recipe.rollout
        self._reward_config = recipe.reward
        self._tokenizer = AutoTokenizer.from_pretrained(recipe.policy.hf)
        self._source = make_source(recipe.data, recipe.run.seed, self._tokenizer)
        self._reward = Reward(recipe.reward)
        self._vocab_size = json.loads((Path(recipe.policy.hf) / "config.json").read_text())["vocab_size"]
        self._overlong = recipe.reward.overlong
        self._sampling = Sampling.of(recipe.rollout, stop_token_ids(recipe.policy.hf, self._tokenizer))

    def sample(
        self, urls: Sequence[str], step: int, weight_version: int, record: Path, on_progress: Progress
    ) -> dict[str, float]:
        """Sample the batch of `step` from `urls` into `record`; returns what the step reports about sampling.

        Raises RuntimeError when a token was sampled by other weights than `weight_version`.
        """
        started, dropped = time.monotonic(), self._source.dropped
        prompts = self._source.batch(step, self._recipe.batch.prompts)
        rollout = asyncio.run(self._sample(urls, prompts, step, on_progress))
        _check_versions(rollout, weight_version)
        write_record(record, rollout.index, rollout.trajectories, self._describe(prompts, rollout))
        seconds = time.monotonic() - started
        if rollout.failures:
            first = rollout.failures[0]
            print(
                f"[reward] step {step}: {len(rollout.failures)} rewards failed and count as 0; the first, of response "
                f"{first.response} of its group:\n{first.trace}",  # its end names the prompt
                flush=True,
            )
        return {
            "rollout/tokens_per_s": float(rollout.index.response_lens.sum()) / seconds,
            "rollout/discarded_groups": float(rollout.discarded),
            "reward/errors": float(len(rollout.failures)),
            "data/dropped_prompts": float(self._source.dropped - dropped),
        }

    async def _sample(
        self,
        urls: Sequence[str],
        prompts: list[Prompt],
        step: int,
        on_progress: Progress,
    ) -> Rollout:
        """Sample `prompts`; those that dynamic sampling replaces are replaced in the list."""
        dynamic = self._rollout.dynamic_sampling

        async def reward(number: int, sample: Sample) -> Mapping[str, float]:
            return await self._reward(prompts[number], self._text(sample.output_ids.tolist()))

        def replace(number: int, attempt: int) -> Sequence[int]:
            prompts[number] = self._source.replacement(step, len(prompts), number, attempt)
            return self._ids(prompts[number])

        client = SglangClient(
            urls,
            vocab_size=self._vocab_size,
            max_concurrency=self._rollout.max_concurrency,
            timeout_s=self._rollout.request_timeout_s,
            retries=self._rollout.retries,
        )
        async with client, watched(self._reward, partial(print, flush=True)):
            return await sample_batch(
                client,
                [self._ids(prompt) for prompt in prompts],
                reward,
                self._sampling,
                n=self._recipe.batch.samples,
                name=f"step{step}",
                reward_concurrency=self._reward_config.concurrency,
                on_reward_error=self._reward_config.on_error,
                on_progress=on_progress,
                shape=self._shaped,
                replace=replace if dynamic else None,
                max_attempts=dynamic.max_attempts if dynamic else 1,
                train_cut_short=self._rollout.train_cut_short,
            )

    def _shaped(self, scores: Mapping[str, float], sample: Sample) -> Mapping[str, float]:
        """`scores` of a response with the punishment of long ones, where the recipe asks for it."""
        if self._overlong is None:
            return scores
        penalty = self._overlong.weight * overlong_penalty(
            len(sample.output_ids), max_tokens=self._rollout.max_new_tokens, buffer=self._overlong.buffer
        )
        return {**scores, "reward": scores["reward"] + penalty, "overlong": penalty}

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        return tokenize(prompt.prompt, self._tokenizer)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _describe(self, prompts: Sequence[Prompt], rollout: Rollout) -> list[dict[str, Any]]:
        """What a person wants to read of each row."""
        bounds, index = rollout.trajectories.offsets.tolist(), rollout.index
        rows = []
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            prompt = prompts[int(index.group[row])]
            response = rollout.trajectories.tokens[start + int(index.prompt_lens[row]) : end]
            rows.append(
                {
                    "prompt_id": prompt.id,
                    "prompt": prompt.prompt,
                    "response": self._text(response.tolist()),
                    "reward": float(index.rewards[row]),
                }
            )
        return rows


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's eos and those of generation_config.json."""
    ids = {tokenizer.eos_token_id} - {None}
    if (Path(model_path) / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(model_path).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return tuple(sorted(ids))


def _check_versions(rollout: Rollout, weight_version: int) -> None:
    versions = rollout.trajectories.versions
    sampled = versions[versions >= 0].unique().tolist()  # prompts have none
    if sampled != [weight_version]:
        raise RuntimeError(
            f"the batch was sampled by weight versions {sampled}, expected {weight_version} alone: another trainer "
            "updates these servers, or a weight update was lost"
        )
