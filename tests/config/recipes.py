"""Two small recipes with known line numbers, and what the loader says about changed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import RecipeError, load_recipe

GSPO = """\
run:
  dir: runs/x
  steps: 10
policy:
  hf: no/such/model
  optimizer:
    lr: 3e-4
objective:
  name: gspo
advantage: {}
batch:
  prompts: 32
  samples: 16
  mini_batches: 2
data:
  source: sort_digits
  max_prompt_tokens: 64
rollout:
  max_new_tokens: 16
reward:
  name: sort_digits
"""

SFT = """\
run:
  dir: runs/x
  steps: 10
policy:
  hf: no/such/model
  optimizer:
    lr: 3e-4
objective:
  name: sft
batch:
  prompts: 32
data:
  source: jsonl
  path: answers.jsonl
"""


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def edit(text: str, *changes: tuple[str, str]) -> str:
    """`text` with each (old, new) applied; an `old` that does not stand there exactly once is a mistake in the test."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def refusal(path: Path, *overrides: str) -> str:
    """The message that refuses the recipe, with the folder cut from the paths in it."""
    with pytest.raises(RecipeError) as info:
        load_recipe(path, overrides)
    return str(info.value).replace(f"{path.parent}/", "")
