"""The stream of prompts: a function of the step and the seed alone, so that a resumed run needs no saved state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data.files import draw_from_file
from megatron_gspo.data.jsonl import JsonlRows
from megatron_gspo.data.parquet import ParquetRows
from megatron_gspo.data.prompt import Prompt, tokenize
from megatron_gspo.data.tasks import draw_from_task

Draw = Callable[[int, int], Prompt]
"""(position in the endless stream, attempt) -> the prompt there; attempts after 0 are its replacements, in order."""

MAX_ATTEMPTS = 1000


class PromptSource:
    """An endless stream of prompts that fit. A prompt longer than `max_prompt_tokens` is never cut: its position is
    filled by the next replacement that fits, which depends on position and seed only. `dropped` counts them."""

    def __init__(self, draw: Draw, tokenizer: Any, max_prompt_tokens: int):
        self._draw = draw
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self.dropped = 0

    def batch(self, step: int, n: int) -> list[Prompt]:
        """The `n` prompts of `step`: positions step * n to (step + 1) * n of the stream."""
        return [self._fitting(position, 0) for position in range(step * n, (step + 1) * n)]

    def replacement(self, step: int, n: int, number: int, attempt: int) -> Prompt:
        """What takes the place of prompt `number` of the `n` of `step`; each `attempt` from 1 gives another."""
        return self._fitting(step * n + number, attempt)

    def _fitting(self, position: int, attempt: int) -> Prompt:
        for number in range(attempt * MAX_ATTEMPTS, (attempt + 1) * MAX_ATTEMPTS):
            prompt = self._draw(position, number)
            if self._length(prompt) <= self._max_prompt_tokens:
                return prompt
            self.dropped += 1
        raise ValueError(
            f"data.max_prompt_tokens = {self._max_prompt_tokens}: {MAX_ATTEMPTS} prompts in a row are longer, the "
            f"last is {prompt.id}; raise it or give shorter prompts"
        )

    def _length(self, prompt: Prompt) -> int:
        try:
            return len(tokenize(prompt.prompt, self._tokenizer))
        except Exception as error:  # of the chat template, most often
            error.add_note(f"in the prompt {prompt.id}")
            raise


def make_source(config: DataConfig, seed: int, tokenizer: Any, *, responses: bool = False) -> PromptSource:
    """The prompts that `config` describes; `tokenizer` (HF) measures them. With `responses`, every row of a file has
    one. Raises ValueError for a source, a file or arguments that do not work, naming the key or the file and line."""
    return PromptSource(_make_draw(config, seed, responses), tokenizer, config.max_prompt_tokens)


def _make_draw(config: DataConfig, seed: int, responses: bool) -> Draw:
    if config.source == "jsonl":
        return draw_from_file(JsonlRows(config, responses=responses), seed, shuffle=config.shuffle)
    if config.source == "parquet":
        return draw_from_file(ParquetRows(config, responses=responses), seed, shuffle=config.shuffle)
    return draw_from_task(config.source, seed, config.args)
