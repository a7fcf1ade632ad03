from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data import make_source, tokenize


def jsonl(path: Path, *rows) -> DataConfig:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return DataConfig(source="jsonl", path=str(path))


def texts(source, step: int, n: int) -> list:
    return [prompt.prompt for prompt in source.batch(step, n)]


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own(tmp_path, tokenizer):
    config = jsonl(tmp_path / "a.jsonl", *({"prompt": f"q{i}"} for i in range(10)))
    source = make_source(config, seed=3, tokenizer=tokenizer)
    epochs = [texts(source, step, 10) for step in range(3)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_depends_on_step_and_seed_alone(tmp_path, tokenizer):
    config = jsonl(tmp_path / "a.jsonl", *({"prompt": f"q{i}"} for i in range(10)))
    straight, resumed = (make_source(config, seed=3, tokenizer=tokenizer) for _ in range(2))
    batches = [texts(straight, step, 4) for step in range(6)]
    assert texts(resumed, 5, 4) == batches[5]
    assert texts(resumed, 2, 4) == batches[2]  # rows 8 to 11: straddles two epochs
    assert texts(make_source(config, seed=4, tokenizer=tokenizer), 0, 4) != batches[0]


def test_without_shuffle_rows_come_in_file_order_and_wrap(tmp_path, tokenizer):
    jsonl(tmp_path / "a.jsonl", *({"prompt": f"q{i}"} for i in range(3)))
    config = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), shuffle=False)
    source = make_source(config, seed=0, tokenizer=tokenizer)
    assert texts(source, 0, 2) + texts(source, 1, 2) == ["q0", "q1", "q2", "q0"]


def test_a_row_gives_prompt_response_meta_and_its_place(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    config = jsonl(path, "\n", {"prompt": "2+2=", "response": "4", "level": 1})
    (prompt,) = make_source(config, seed=0, tokenizer=tokenizer).batch(0, 1)
    assert (prompt.prompt, prompt.response) == ("2+2=", "4")
    assert prompt.meta == {"response": "4", "level": 1}
    assert prompt.id == f"{path}:2"


def test_too_long_prompts_are_replaced_and_counted_never_cut(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    jsonl(path, *({"prompt": "x" * length} for length in (3, 4, 5, 9)))
    config = DataConfig(source="jsonl", path=str(path), max_prompt_tokens=4)
    source = make_source(config, seed=0, tokenizer=tokenizer)
    batches = [texts(source, step, 4) for step in range(4)]
    assert {text for batch in batches for text in batch} == {"xxx", "xxxx"}
    assert source.dropped >= 8  # 5 and 9 come once in each of the four epochs
    assert texts(make_source(config, seed=0, tokenizer=tokenizer), 3, 4) == batches[3]


def test_a_file_without_a_prompt_that_fits_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    jsonl(path, {"prompt": "12345"})
    config = DataConfig(source="jsonl", path=str(path), max_prompt_tokens=4)
    with pytest.raises(ValueError, match=r"data.max_prompt_tokens = 4: .*a.jsonl:1"):
        make_source(config, seed=0, tokenizer=tokenizer).batch(0, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"\n', "a.jsonl:2: not valid JSON"),
        ("[1]\n", "a.jsonl:2: expected a JSON object"),
        ('{"prompt": "a", "by": ["\\uD83d"]}\n', "a.jsonl:2: not valid JSON: 'utf-8' codec can't encode"),
        ('{"question": "a", "id": 1}\n', "a.jsonl:2: no field 'prompt' (data.prompt_key); the fields are question, id"),
        ('{"prompt": 7}\n', "a.jsonl:2: the field 'prompt' (data.prompt_key) is 7"),
        ('{"prompt": ""}\n', "a.jsonl:2: the field 'prompt' (data.prompt_key) is ''"),
        ('{"prompt": [{"role": "user"}]}\n', "a.jsonl:2: the field 'prompt' (data.prompt_key) is [{'role': 'user'}]"),
    ],
)
def test_a_bad_line_is_named_before_the_run_starts(tmp_path, tokenizer, line, message):
    config = jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, line)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_source(config, seed=0, tokenizer=tokenizer)


def test_a_prompt_that_the_chat_template_refuses_is_named(tmp_path, tokenizer):
    config = jsonl(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": None}]})
    with pytest.raises(TypeError) as caught:
        make_source(config, seed=0, tokenizer=tokenizer).batch(0, 1)
    assert caught.value.__notes__ == [f"in the prompt {tmp_path}/a.jsonl:1"]


def test_characters_written_as_surrogate_pairs_are_read(tmp_path, tokenizer):
    config = jsonl(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\ude00"}\n')
    assert texts(make_source(config, seed=0, tokenizer=tokenizer), 0, 1) == ["\U0001f600"]


BAD_RESPONSES = [
    ({"prompt": "a", "response": 5}, "the field 'response' (data.response_key) is 5; expected a string"),
    ({"prompt": "a", "response": None}, "the field 'response' (data.response_key) is None; expected a string"),
]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *BAD_RESPONSES,
        ({"prompt": "a", "answer": "b"}, "no field 'response' (data.response_key); the fields are prompt, "),
    ],
)
def test_a_bad_response_is_named_before_a_supervised_run_starts(tmp_path, tokenizer, row, message):
    config = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, row)
    assert len(make_source(config, seed=0, tokenizer=tokenizer).batch(0, 2)) == 2  # sampled: no response is needed
    with pytest.raises(ValueError, match=re.escape(f"a.jsonl:2: {message}")):
        make_source(config, seed=0, tokenizer=tokenizer, responses=True)


@pytest.mark.parametrize(
    ("prompts", "responses", "message"),
    [
        (["a", None, "c"], ["x", "y", "z"], "row 1: the field 'prompt' (data.prompt_key) is None"),
        (["a", "b", ""], ["x", "y", "z"], "row 2: the field 'prompt' (data.prompt_key) is ''"),
        (
            ["a", "b", "c"],
            ["x", "y", None],
            "row 2: the field 'response' (data.response_key) is None; expected a string",
        ),
        (["a", "b", "c"], [1, 2, 3], "row 0: the field 'response' (data.response_key) is 1; expected a string"),
    ],
)
def test_every_row_of_a_parquet_is_checked_before_the_run_starts(tmp_path, tokenizer, prompts, responses, message):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": prompts, "response": responses}), path, row_group_size=2)
    with pytest.raises(ValueError, match=re.escape(f"a.parquet:{message}")):
        make_source(DataConfig(source="parquet", path=str(path)), seed=0, tokenizer=tokenizer, responses=True)


def test_missing_and_empty_files_are_named(tmp_path, tokenizer):
    for source in ("jsonl", "parquet"):
        config = DataConfig(source=source, path=str(tmp_path / "none"))
        with pytest.raises(ValueError, match=r"data.path = .*none': no such file"):
            make_source(config, seed=0, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="holds no prompts"):
        make_source(jsonl(tmp_path / "a.jsonl", "\n"), seed=0, tokenizer=tokenizer)


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(10)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    parquet = make_source(DataConfig(source="parquet", path=str(path)), seed=1, tokenizer=tokenizer)
    lines = make_source(jsonl(tmp_path / "a.jsonl", *rows), seed=1, tokenizer=tokenizer)
    ours, theirs = parquet.batch(1, 7), lines.batch(1, 7)
    assert [(each.prompt, each.meta) for each in ours] == [(each.prompt, each.meta) for each in theirs]
    assert ours[0].id == f"{path}:row {ours[0].meta['answer']}"


def test_a_parquet_without_the_prompt_column_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["a"]}), path)
    with pytest.raises(ValueError, match=r"a.parquet:row 0: no field 'prompt' .* the fields are question"):
        make_source(DataConfig(source="parquet", path=str(path)), seed=0, tokenizer=tokenizer)
    (tmp_path / "b.parquet").write_text("prompt")
    with pytest.raises(ValueError, match="not a Parquet file"):
        make_source(DataConfig(source="parquet", path=str(tmp_path / "b.parquet")), seed=0, tokenizer=tokenizer)


def test_strings_are_encoded_bare_and_messages_by_the_chat_template(tokenizer):
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    user, assistant = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
    assert tokenize("ab", tokenizer) == [a, b]
    assert tokenize([{"role": "user", "content": "ab"}], tokenizer) == [user, a, b, assistant]
