from __future__ import annotations

import re

import pytest

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data import make_source


def test_sort_digits_gives_digits_and_their_order(tokenizer):
    config = DataConfig(source="sort_digits", args={"length": 6})
    for prompt in make_source(config, seed=0, tokenizer=tokenizer).batch(0, 50):
        assert re.fullmatch(r"\d{6}>", prompt.prompt)
        assert prompt.response == prompt.meta["answer"] == "".join(sorted(prompt.prompt[:6]))


@pytest.mark.parametrize("name", ["sort_digits", "reasoning_gym:number_sorting"])
def test_a_task_is_a_function_of_seed_and_index(tokenizer, name):
    if ":" in name:
        pytest.importorskip("reasoning_gym")
    config = DataConfig(source=name)
    straight, resumed, other = (make_source(config, seed=seed, tokenizer=tokenizer) for seed in (0, 0, 1))
    seen = [straight.batch(step, 20) for step in range(3)]
    assert resumed.batch(2, 20) == seen[2]
    prompts = [prompt.prompt for batch in seen for prompt in batch]
    assert len(set(prompts)) == 60
    assert not {prompt.prompt for prompt in other.batch(0, 60)} & set(prompts)


def test_too_long_tasks_are_drawn_anew(tokenizer):
    pytest.importorskip("reasoning_gym")
    config = DataConfig(source="reasoning_gym:chain_sum", max_prompt_tokens=75)
    source = make_source(config, seed=0, tokenizer=tokenizer)
    lengths = [len(prompt.prompt.encode()) for prompt in source.batch(0, 30)]
    assert max(lengths) <= 75
    assert source.dropped > 0


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("sort_digit", {}, "data.source = 'sort_digit': no such source; valid: jsonl, parquet, sort_digits"),
        ("sort_digits", {"size": 3}, "'sort_digits' takes length"),
        ("sort_digits", {"length": 0}, "data.args.length = 0"),
        ("reasoning_gym:number_sort", {}, "reasoning-gym has no such data set; try number_sorting"),
        ("reasoning_gym:zzz", {}, "no such data set; `reasoning_gym.factory.DATASETS` names its "),
        ("reasoning_gym:number_sorting", {"min_numbrs": 3}, "the data set 'number_sorting' refuses them"),
        ("reasoning_gym:number_sorting", {"min_numbers": 0}, "the data set 'number_sorting' refuses them"),
        ("reasoning_gym:number_sorting", {"seed": 0}, "the data set 'number_sorting' refuses them"),
    ],
)
def test_unknown_tasks_and_arguments_are_refused(tokenizer, source, args, message):
    if ":" in source:
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=re.escape(message)):
        make_source(DataConfig(source=source, args=args), seed=0, tokenizer=tokenizer)


def test_replacements_depend_on_seed_place_and_attempt_alone(tokenizer):
    config = DataConfig(source="sort_digits", args={"length": 6}, max_prompt_tokens=16)

    def drawn(seed: int) -> list[str]:
        source = make_source(config, seed=seed, tokenizer=tokenizer)
        return [source.replacement(step, 4, n, a).prompt for step in (0, 1) for n in range(4) for a in (1, 2, 3)]

    assert drawn(0) == drawn(0) != drawn(1)
    first = make_source(config, seed=0, tokenizer=tokenizer).batch(0, 4)
    assert len({*drawn(0), *(prompt.prompt for prompt in first)}) == 28
