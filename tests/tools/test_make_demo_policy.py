from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_demo_policy import main


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    out = tmp_path_factory.mktemp("policy") / "demo"
    assert main(["--out", str(out), "--seed", "1"]) == 0
    return out


def test_the_checkpoint_loads_and_has_the_promised_size(policy):
    model = AutoModelForCausalLM.from_pretrained(policy)
    assert model.config.model_type == "qwen3_moe"
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (8, 2)
    assert 1e6 <= model.num_parameters() <= 3e6
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(policy))
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert 0.3 < logits.std() < 3  # neither flat nor saturated: it can learn


def test_no_embedding_is_zero(policy):
    """A zero row for <pad> made the gradient norm of a batch with one sampled <pad> 1890 instead of 1."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    assert model.get_input_embeddings().weight.norm(dim=1).min() > 0.5


def test_the_tokenizer_encodes_any_text_and_gives_it_back(policy):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    text = "31405>\n Größe <b>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer("<eos>")["input_ids"], skip_special_tokens=True) == ""


def test_running_again_changes_nothing_and_another_seed_is_refused(policy, capsys):
    before = (policy / "model.safetensors").read_bytes()
    assert main(["--out", str(policy), "--seed", "1"]) == 0
    assert "already" in capsys.readouterr().out
    assert main(["--out", str(policy), "--seed", "2"]) == 1
    assert "another demo policy" in capsys.readouterr().err
    assert (policy / "model.safetensors").read_bytes() == before


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert main(["--out", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
