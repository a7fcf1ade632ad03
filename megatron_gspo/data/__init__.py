"""Prompts, and for supervised training their responses: from files and from task generators."""

from megatron_gspo.data.prompt import Prompt, tokenize
from megatron_gspo.data.source import PromptSource, make_source
from megatron_gspo.data.tasks import register_task

__all__ = ["Prompt", "PromptSource", "make_source", "register_task", "tokenize"]
