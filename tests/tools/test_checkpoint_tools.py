"""The four checkpoint tools as a user calls them: what they print, and their exit codes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import run_ranks
from tests.weights.models import write_checkpoint

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def call(tool: str, *arguments: object) -> int:
    spec = importlib.util.spec_from_file_location(tool, TOOLS / f"{tool}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


def leave(*arguments: object) -> None:
    sys.exit(call(*arguments))  # type: ignore[arg-type]


@pytest.fixture
def tool(capfd):
    """Runs a tool on ranks (forks that end with it); (exit code, stdout, stderr)."""

    def run(name: str, *arguments: object, ranks: int = 1) -> tuple[int, str, str]:
        codes = run_ranks(ranks, call, name, *arguments)
        return max(codes), *capfd.readouterr()

    return run


def changed(source: Path, target: Path) -> Path:
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    del tensors["model.layers.0.mlp.gate.weight"]
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(5, 32)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def test_there_and_back_and_compared(tmp_path: Path, tool):
    hf, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    write_checkpoint(hf, moe=True, tie_word_embeddings=False)
    code, out, _ = tool("hf_to_megatron", "--hf", hf, "--out", megatron, "--dtype", "bf16")
    assert code == 0 and "megatron: 0.00 GB of parameters" in out
    assert tool("megatron_to_hf", "--megatron", megatron, "--out", back, ranks=2)[0] == 0
    code, out, _ = tool("compare_checkpoints", megatron, back, "--logits", ranks=2)
    assert code == 0 and "87 tensors (Megatron) against 87 (HF): 0 differ" in out
    assert "logits on 64 tokens: max relative difference 0, same argmax 100.0%" in out
    code, out, _ = tool("compare_checkpoints", hf, megatron)
    assert code == 1 and "lm_head.weight: dtype float32 against bfloat16 and numbers, max difference" in out
    assert tool("compare_checkpoints", hf, megatron, "--any-dtype", "--tolerance", 2**-8)[0] == 0
    code, _, err = tool("hf_to_megatron", "--hf", hf, "--out", megatron)
    assert code == 2 and "error: writing the Megatron checkpoint failed on rank 0: FileExistsError" in err
    assert "Traceback" not in err


def test_every_kind_of_difference_is_told(tmp_path: Path, tool):
    write_checkpoint(tmp_path / "hf", moe=True, tie_word_embeddings=False)
    other = changed(tmp_path / "hf", tmp_path / "other")
    for ranks in (1, 2):
        code, out, _ = tool("compare_checkpoints", tmp_path / "hf", other, ranks=ranks)
        assert code == 1 and "87 tensors (HF) against 86 (HF): 4 differ" in out
        assert f"model.layers.0.mlp.gate.weight: only in {tmp_path / 'hf'}" in out
        assert "model.layers.1.mlp.gate.weight: shape [4, 32] against [5, 32]" in out
        assert "model.norm.weight: numbers, max difference 0.5, relative 0." in out
        assert "lm_head.weight: dtype float32 against bfloat16 and numbers, max difference" in out
    code, _, err = tool("compare_checkpoints", tmp_path / "hf", tmp_path / "nowhere")
    assert code == 2 and "error: " in err and "nowhere: neither model.safetensors nor" in err


def test_what_a_checkpoint_holds_and_who_owns_it(tmp_path: Path, tool, capfd):
    write_checkpoint(tmp_path / "hf", moe=True, tie_word_embeddings=False, save={"save_original_format": False})
    assert tool("hf_to_megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")[0] == 0
    outputs = []
    for kind in ("hf", "megatron"):
        arguments = ("inspect_checkpoint", tmp_path / kind, "--layout", "tp=2,pp=2,ep=2")
        process = multiprocessing.get_context("fork").Process(target=leave, args=arguments)
        process.start()  # without a process group: the tool makes one for every rank of the layout
        process.join(120)
        assert process.exitcode == 0
        outputs.append(capfd.readouterr().out.splitlines())
    # 3 outside of layers; per layer 6 of attention, 2 norms, 1 router, 4 x 3 of experts. An expert is 3 x 24 x 32.
    for kind, lines in zip(("HF", "Megatron"), outputs, strict=True):
        assert lines[0] == f"{kind} checkpoint, family qwen3_moe"
        assert lines[2].startswith("87 tensors, read as float32; largest ")
        assert "routed experts 0.04 M" in lines[3]
        assert [line.split(":")[0] for line in lines[4:]] == [
            "rank 0 [tp0 pp0 ep0]", "rank 1 [tp1 pp0 ep1]", "rank 2 [tp0 pp1 ep0]", "rank 3 [tp1 pp1 ep1]"
        ]  # fmt: skip
        assert lines[4].endswith("layers 0-1; experts 0-1; embedding.word_embeddings")
        assert lines[7].endswith("layers 2-3; experts 2-3; decoder.final_layernorm; output_layer")


@pytest.mark.parametrize("name", ["hf_to_megatron", "megatron_to_hf", "compare_checkpoints", "inspect_checkpoint"])
def test_help_teaches_by_example(name: str, capsys):
    with pytest.raises(SystemExit) as stop:
        call(name, "--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0 and f"python tools/{name}.py " in out and "Exit code 0" in out
