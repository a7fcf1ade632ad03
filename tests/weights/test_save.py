"""An exported checkpoint is one that transformers loads, complete or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights import tensor_file
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.load import load_hf
from megatron_gspo.weights.save import save_hf
from tests.ranks import run_ranks
from tests.weights.models import built, read_config, write_checkpoint

LAYOUT = LayoutConfig(tp=2, pp=2, ep=2)


def export(source: Path, targets: dict[Path, torch.dtype | None]) -> list[str]:
    """Saves into each target; returns the errors."""
    errors = []
    with built(source, LAYOUT) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        load_hf(source, binding)
        for target, export_dtype in targets.items():
            try:
                save_hf(target, plan_export(binding, export_dtype), source, size_bytes=20_000)
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def test_transformers_loads_what_four_ranks_wrote(tmp_path: Path):
    source, fp32, bf16 = tmp_path / "source", tmp_path / "out" / "fp32", tmp_path / "bf16"
    write_checkpoint(source, moe=True, tie_word_embeddings=False, mlp_only_layers=[0])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (source / name).write_text(name)
    (tmp_path / "bf16").mkdir()  # an empty directory may be there
    expected = load_file(source / "model.safetensors")
    for errors in run_ranks(4, export, source, {fp32: None, bf16: torch.bfloat16, source: None}):
        (error,) = errors
        assert f"{source} is not an empty directory" in error

    model, info = AutoModelForCausalLM.from_pretrained(fp32, output_loading_info=True)
    assert not any(info.values()), info
    original = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert model.dtype == torch.float32
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())

    shards = sorted(fp32.glob("*.safetensors"))
    assert len(shards) > 4 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((fp32 / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert set(index["weight_map"]) == set(expected)
    assert (fp32 / "tokenizer.json").read_text() == "tokenizer.json" and (fp32 / "chat_template.jinja").exists()
    assert (fp32 / "generation_config.json").exists() and not (fp32 / "README.md").exists()
    assert read_config(fp32) == read_config(source)
    assert read_config(bf16) == read_config(source) | {"dtype": "bfloat16"}
    halves = {k: v for file in bf16.glob("*.safetensors") for k, v in load_file(file).items()}
    assert all(torch.equal(halves[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "out", "source"]
    kept = load_file(source / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())


def fail_to_write(descriptor: int, data: memoryview, offset: int) -> None:
    if os.readlink(f"/proc/self/fd/{descriptor}").split("/")[-1].startswith("model-00003"):
        raise OSError(28, "No space left on device")
    os.pwrite(descriptor, data, offset)


def export_on_full_disk(source: Path, target: Path) -> list[str]:
    tensor_file.write_all = fail_to_write
    return export(source, {target: None})


def test_an_export_that_fails_leaves_nothing_and_every_rank_knows(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    write_checkpoint(source, moe=True)
    for errors in run_ranks(4, export_on_full_disk, source, target):
        assert len(errors) == 1 and "No space left on device" in errors[0] and "model-00003" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
