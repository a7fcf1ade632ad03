"""Supervised batches (objective sft): prompts with the responses that the data gives, as trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoTokenizer

from megatron_gspo.batch.trajectory import Finish, Trajectories, TrajectoryIndex
from megatron_gspo.config import Recipe
from megatron_gspo.data import make_source, tokenize

LOOK_EVERY = 1024  # prompts; some tenths of a second


@dataclass(frozen=True, kw_only=True)
class Given:
    """The batch of a step; `dropped` prompts were longer than data.max_prompt_tokens and have been replaced in it."""

    index: TrajectoryIndex
    trajectories: Trajectories
    dropped: int


def given_batch(recipe: Recipe) -> Callable[[int, Callable[[], bool]], Given | None]:
    """A function from the step to its batch; the same on every rank, since it depends on data, seed and step alone.

    Its second argument is asked after every LOOK_EVERY prompts whether to leave, which gives None.
    Raises ValueError for a prompt without a response, a sequence beyond batch.max_tokens or a tokenizer without an
    end-of-sequence token.
    """
    tokenizer = AutoTokenizer.from_pretrained(recipe.policy.hf)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"policy.hf: the tokenizer of {recipe.policy.hf} has no eos_token; a response needs an end")
    source = make_source(recipe.data, recipe.run.seed, tokenizer, responses=True)

    def make(step: int, leave: Callable[[], bool]) -> Given | None:
        n, before = recipe.batch.prompts, source.dropped
        prompts, responses = [], []
        for position in range(step * n, (step + 1) * n):
            (prompt,) = source.batch(position, 1)
            if prompt.response is None:
                raise ValueError(f"data.source {recipe.data.source}: prompt {prompt.id} has no response; sft needs one")
            prompts.append(torch.tensor(tokenize(prompt.prompt, tokenizer)))
            ids = tokenizer(prompt.response, add_special_tokens=False)["input_ids"]
            responses.append(torch.tensor([*ids, tokenizer.eos_token_id]))
            length, room = len(prompts[-1]) + len(responses[-1]), recipe.batch.max_tokens
            if length > room:
                raise ValueError(
                    f"{prompt.id}: prompt and response have {length} tokens, and batch.max_tokens = {room} must hold "
                    "the longest; raise it, or take the row out of the data"
                )
            if len(prompts) % LOOK_EVERY == 0 and leave():
                return None
        index, trajectories = assemble(prompts, responses)
        return Given(index=index, trajectories=trajectories, dropped=source.dropped - before)

    return make


def assemble(prompts: list[Tensor], responses: list[Tensor]) -> tuple[TrajectoryIndex, Trajectories]:
    """Trajectories of given token ids; every response token trains, rewards are 0 and no rollout engine took part."""
    n = len(prompts)
    prompt_lens = torch.tensor([len(prompt) for prompt in prompts])
    response_lens = torch.tensor([len(response) for response in responses])
    lens = prompt_lens + response_lens
    tokens = torch.cat([part for pair in zip(prompts, responses, strict=True) for part in pair])
    is_response = torch.cat(
        [torch.arange(int(length)) >= start for length, start in zip(lens, prompt_lens, strict=True)]
    )
    index = TrajectoryIndex(
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        trained_lens=response_lens.clone(),
        group=torch.arange(n),
        rewards=torch.zeros(n, dtype=torch.float64),
        finish=torch.full((n,), Finish.stop, dtype=torch.uint8),
        metrics={},
    )
    trajectories = Trajectories(
        rows=torch.arange(n),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]),
        tokens=tokens,
        loss_mask=is_response,
        logprobs=torch.zeros(len(tokens), dtype=torch.float32),
        versions=torch.full((len(tokens),), -1, dtype=torch.int64),
    )
    return index, trajectories
