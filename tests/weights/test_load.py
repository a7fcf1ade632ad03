"""Checkpoints that do not match their config stop the load before it writes, with names; dtypes convert openly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.config.schema import Dtype, LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.load import load_hf
from megatron_gspo.weights.source import HFCheckpoint
from tests.ranks import run_ranks
from tests.weights.models import built, write_checkpoint

Tensors = dict[str, torch.Tensor]
SINGLE = "model.safetensors"


def edited(source: Path, target: Path, edit: Callable[[Tensors], Any]) -> Path:
    """A copy of a single-file checkpoint with other tensors."""
    target.mkdir()
    tensors = load_file(source / SINGLE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / SINGLE)
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def twice(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.stack([tensors[name.format(e)] for e in range(4)])


def test_a_file_that_is_cut_off_is_named(tmp_path):
    checkpoint = tmp_path / "cut"
    checkpoint.mkdir()
    save_file({"a": torch.zeros(1000)}, checkpoint / SINGLE)
    whole = (checkpoint / SINGLE).read_bytes()
    (checkpoint / SINGLE).write_bytes(whole[:100])
    with pytest.raises(
        ValueError, match=r"cut/model.safetensors \(100 bytes\) is damaged or no safetensors file: .*copy"
    ):
        HFCheckpoint(checkpoint)


def test_a_shard_and_an_index_that_disagree_are_named(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"b": "model-1.safetensors"}}')
    with (
        HFCheckpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match=r"model-1.safetensors: holds no b, which"),
    ):
        checkpoint.shape("b")
    for text in ("{", "{}", "[]"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index.json: expected JSON with a weight_map, got"):
            HFCheckpoint(tmp_path)


EDITS: dict[str, tuple[Callable[[Tensors], Any], list[str]]] = {
    "missing": (
        lambda t: [t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), t.pop("model.norm.weight")],
        ["tensors missing: model.norm.weight, model.layers.1.mlp.experts.3.up_proj.weight"],
    ),
    "extra": (
        lambda t: t.update({"model.layers.9.mlp.gate.weight": torch.zeros(1), "visual.patch": torch.zeros(1)}),
        ["tensors of no rule: model.layers.9.mlp.gate.weight, visual.patch"],
    ),
    "written twice": (
        twice,
        ["written twice", "model.layers.0.mlp.experts.0.down_proj.weight and model.layers.0.mlp.experts.down_proj"],
    ),
    "misshapen": (
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(24, 32)}),
        ["model.layers.0.self_attn.k_proj.weight is [24, 32], expected [16, 32]"],
    ),
    "quantised": (
        lambda t: t.update({"lm_head.weight": torch.zeros(128, 32, dtype=torch.float8_e4m3fn)}),
        ["lm_head.weight is float8_e4m3fn", "Dequantise"],
    ),
    "rotary buffer": (
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}),
        ["loaded"],
    ),
}


def load_each(directory: Path, checkpoints: dict[str, Path]) -> dict[str, str]:
    """What loading each checkpoint into one model says; parameters must be untouched by a refusal."""
    messages = {}
    with built(directory, LayoutConfig()) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        before = [bound.parameter.clone() for bound in binding.bound]
        for name, checkpoint in checkpoints.items():
            try:
                load_hf(checkpoint, binding)
            except (ValueError, FileNotFoundError) as error:
                messages[name] = str(error)
                assert all(torch.equal(b.parameter, old) for b, old in zip(binding.bound, before, strict=True)), name
            else:
                messages[name] = "loaded"
    return messages


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hf")
    write_checkpoint(root / "good", moe=True, tie_word_embeddings=False)
    checkpoints = {name: edited(root / "good", root / name, edit) for name, (edit, _) in EDITS.items()}
    write_checkpoint(root / "lost shard", moe=True, tie_word_embeddings=False, save={"max_shard_size": "40KB"})
    sorted((root / "lost shard").glob("*.safetensors"))[1].unlink()
    (root / "no weights").mkdir()
    checkpoints |= {name: root / name for name in ("lost shard", "no weights")}
    checkpoints["rotary buffer"] = checkpoints.pop("rotary buffer")  # last, for it changes the parameters
    return run_ranks(1, load_each, root / "good", checkpoints)[0]


@pytest.mark.parametrize("wrong", EDITS)
def test_what_is_wrong_is_named(wrong: str, messages: dict[str, str]):
    for part in EDITS[wrong][1]:
        assert part in messages[wrong]


def test_missing_files_are_named(messages: dict[str, str]):
    assert "that are not there: model-00002-of-" in messages["lost shard"]
    assert "neither model.safetensors nor model.safetensors.index.json" in messages["no weights"]


def load_duplicate(directory: Path, layout_config: LayoutConfig) -> str:
    with built(directory, layout_config) as (model, layout):
        try:
            load_hf(directory, bind(model.chunks, model.hf_config, layout.pgs))
        except ValueError as error:
            return str(error)
    return "loaded"


def test_a_tied_head_may_be_written_twice_if_it_is_the_same(tmp_path: Path):
    write_checkpoint(tmp_path / "tied", moe=False, tie_word_embeddings=True)
    same = edited(
        tmp_path / "tied", tmp_path / "same", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0})
    )
    other = edited(
        tmp_path / "tied",
        tmp_path / "other",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
    )
    assert run_ranks(2, load_duplicate, same, LayoutConfig(tp=2)) == ["loaded", "loaded"]
    for message in run_ranks(2, load_duplicate, other, LayoutConfig(pp=2)):
        assert "ties lm_head.weight to model.embed_tokens.weight, but their values differ" in message


def load_bf16(directory: Path) -> tuple[dict[str, int], int, int, bool, list[tuple[int, int]]]:
    with built(directory, LayoutConfig(ep=2), Dtype.bf16) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        progress: list[tuple[int, int]] = []
        report = load_hf(directory, binding, lambda done, total: progress.append((done, total)))
        (norm,) = [b.parameter for b in binding.bound if b.name == "decoder.final_layernorm.weight"]
        rounded = load_file(directory / SINGLE)["model.norm.weight"].bfloat16()
        return dict(report.conversions), report.num_tensors, report.size_bytes, torch.equal(norm, rounded), progress


def test_a_rank_reads_its_own_experts_only_and_converts_openly(tmp_path: Path):
    write_checkpoint(tmp_path, moe=True, tie_word_embeddings=False)
    tensors = load_file(tmp_path / SINGLE)
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    expected_bytes = sum(t.nbytes for t in tensors.values()) - sum(t.nbytes for t in experts.values()) // 2
    for conversions, num_tensors, size_bytes, rounded, progress in run_ranks(2, load_bf16, tmp_path):
        assert rounded
        assert num_tensors == len(tensors) - len(experts) // 2
        assert size_bytes == expected_bytes
        assert conversions == {"float32 -> bfloat16": len(progress)}
        assert progress[-1] == (len(progress), len(progress))
