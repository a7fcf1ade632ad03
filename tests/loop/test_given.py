"""Supervised batches: prompts that are too long are counted by the step, and a stop is heeded while a batch is made."""

from __future__ import annotations

import json

import pytest

from megatron_gspo.config import load_recipe
from megatron_gspo.loop import given
from megatron_gspo.loop.source import GivenBatches

RECIPE = """
run: {dir: DIR/run, steps: 5}
policy: {hf: no/such, optimizer: {lr: 1e-4}}
objective: {name: sft}
batch: {prompts: 4, max_tokens: 512}
data: {source: jsonl, path: DIR/data.jsonl, shuffle: false, max_prompt_tokens: 3}
"""


class Letters:
    """A tokenizer of one token a character."""

    eos_token_id = 0

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(given.AutoTokenizer, "from_pretrained", lambda path: Letters())
    # Row 5, in step 1, is too long.
    rows = [{"prompt": "x" * (5 if row == 5 else 2), "response": "y" * row} for row in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DIR", str(tmp_path)))
    return load_recipe(path)


def fetch(recipe, steps, stop=lambda: False):
    counted = []
    source = GivenBatches(recipe, stop, lambda name, value: counted.append((name, value)))
    return [source.fetch(step, step) for step in steps], counted


def test_prompts_that_are_too_long_are_counted_by_the_step(recipe):
    """A run that resumes at step 2 counts what one counts that never stopped."""
    _, whole = fetch(recipe, range(4))
    assert {name for name, _ in whole} == {"data/dropped_prompts"}
    counts = [count for _, count in whole]
    assert counts[0] == counts[2] == 0 and counts[1] >= 1 and counts[3] >= 1
    assert fetch(recipe, [2, 3])[1] == whole[2:]


def test_positions_of_the_stream_make_the_batch(recipe):
    (batch,), _ = fetch(recipe, [0])
    assert batch.index.response_lens.tolist() == [1, 2, 3, 4]  # and the end-of-sequence token
    assert batch.index.prompt_lens.tolist() == [2, 2, 2, 2]


def test_a_row_beyond_the_longest_micro_batch_is_named(recipe, tmp_path):
    """Prompt, response and the end-of-sequence token: 2 + 509 + 1 fit into 512, one more does not."""
    rows = [{"prompt": "xx", "response": "y" * length} for length in (1, 509, 510, 1)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as caught:
        fetch(recipe, [0])
    assert str(caught.value) == (
        f"{tmp_path}/data.jsonl:3: prompt and response have 513 tokens, and batch.max_tokens = 512 must hold the "
        "longest; raise it, or take the row out of the data"
    )
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2] * 2))
    (batch,), _ = fetch(recipe, [0])
    assert batch.index.lens.tolist() == [4, 512] * 2


def test_a_stop_is_heeded_while_a_batch_is_made(recipe, monkeypatch):
    monkeypatch.setattr(given, "LOOK_EVERY", 2)
    looks = []
    batches, counted = fetch(recipe, [0], stop=lambda: bool(looks.append(None)) or len(looks) == 1)
    assert batches == [None] and counted == [] and len(looks) == 1
