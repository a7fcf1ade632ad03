"""A step's batch from a small server that gives every prompt the same two responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_gspo.batch.record import read_index
from megatron_gspo.config import load_recipe
from megatron_gspo.loop.rollout_batch import BatchSampler
from tests.rollout.test_control import answering
from tools.make_demo_policy import make_tokenizer

RECIPE = """
run: {dir: DIR/run, steps: 5}
policy: {hf: DIR/hf, optimizer: {lr: 1e-4}}
objective: {name: gspo}
advantage: {}
batch: {prompts: 2, samples: 2, max_tokens: 512}
data: {source: jsonl, path: DIR/data.jsonl, shuffle: false, max_prompt_tokens: 3}
rollout: {max_new_tokens: 12}
reward: {name: exact_match}
"""
ROWS = [{"prompt": "x" * length, "answer": "a"} for length in (2, 5, 2, 3, 2, 2, 4, 9)]  # steps 0 and 3 drop some


@pytest.fixture
def path(tmp_path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(tokenizer)}))
    write_rows(tmp_path, ROWS)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("DIR", str(tmp_path)))
    return path


def write_rows(directory: Path, rows: list[dict[str, str]]) -> None:
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def url() -> Iterator[str]:
    tokens = make_tokenizer()("aa", add_special_tokens=False)["input_ids"]

    def reply(n: int) -> dict[str, object]:
        return {
            "output_ids": tokens[:n],
            "meta_info": {
                "output_token_logprobs": [[-0.5, token, None] for token in tokens[:n]],
                "weight_versions": [{"version": "7", "start": 0, "end": n}],
                "finish_reason": {"type": "stop"},
            },
        }

    with answering({"/generate": (200, [reply(1), reply(2)], 0.0)}) as url:
        yield url


def sample(sampler: BatchSampler, url: str, step: int, record: Path) -> dict[str, float]:
    return sampler.sample([url], step, 7, record, lambda done, total: None)


def test_prompts_that_are_too_long_are_counted_by_the_step(path, url, tmp_path):
    """A run that resumes at step 3 counts what one counts that never stopped."""
    recipe = load_recipe(path)
    sampler = BatchSampler(recipe)
    counts = []
    for step in range(4):
        counts.append(sample(sampler, url, step, tmp_path / f"{step}")["data/dropped_prompts"])
        index = read_index(tmp_path / f"{step}")
        assert index.prompt_lens.max() <= 3 and index.n == 4
    assert counts[0] >= 1 and counts[1:3] == [0, 0] and counts[3] >= 2
    assert sample(BatchSampler(recipe), url, 3, tmp_path / "resumed")["data/dropped_prompts"] == counts[3]


def test_a_reward_that_fails_names_its_own_prompt_where_another_has_taken_its_place(path, url, tmp_path, capfd):
    write_rows(tmp_path, [{"prompt": "x"}, {"prompt": "y"}])  # no answer to compare with
    sampler = BatchSampler(load_recipe(path, ["rollout.dynamic_sampling={max_attempts: 2}"]))
    stats = sample(sampler, url, 0, tmp_path / "record")
    assert stats["reward/errors"] == 8 and stats["rollout/discarded_groups"] == 2
    output = capfd.readouterr().out
    assert "step 0: 8 rewards failed and count as 0; the first, of response 0 of its group:" in output
    assert "KeyError: 'answer'" in output and output.count("data.jsonl:") == 1
