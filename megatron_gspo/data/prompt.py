"""One prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]
"""Chat messages, each with a role and its content, in the form that chat templates take."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked, and what is known about it."""

    id: str
    """Names the prompt in reports: `file:line`, or `task/index`."""
    prompt: str | Messages
    response: str | None = None
    """The response to imitate (objective sft); None where the data gives none."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that the data says, for the reward."""


def tokenize(prompt: str | Messages, tokenizer: Any) -> list[int]:
    """Token ids of `prompt` by an HF tokenizer. A string is encoded as it stands, without special tokens; messages go
    through the chat template, up to where the assistant's answer begins. Raises what the chat template raises."""
    if isinstance(prompt, str):
        return tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
