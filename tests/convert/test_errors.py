"""What is wrong with a checkpoint is named, nothing that it holds runs, and nothing half-made is left."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.convert.dcp_read import read_metadata
from megatron_gspo.convert.to_hf import megatron_to_hf
from megatron_gspo.convert.to_megatron import hf_to_megatron
from megatron_gspo.weights import output, tensor_file
from tests.ranks import run_ranks
from tests.weights.models import read_config, write_checkpoint

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    write_checkpoint(root / "hf", moe=True, tie_word_embeddings=False)
    write_checkpoint(root / "sharded", moe=True, tie_word_embeddings=False, save={"max_shard_size": "40KB"})
    run_ranks(1, hf_to_megatron, root / "hf", root / "megatron")
    return {name: root / name for name in ("hf", "sharded", "megatron")}


def message(step: Callable[..., Any], *args: Any) -> str:
    try:
        step(*args)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        return str(error)
    return "done"


def messages(step: Callable[..., Any], cases: dict[str, tuple]) -> dict[str, str]:
    return {name: message(step, *args) for name, args in cases.items()}


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        edit(tensors)
        save_file(tensors, folder / SINGLE)

    return change


def edit_config(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(read_config(folder) | fields))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"][5, 7] = float("nan")


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def add_to_shard(folder: Path) -> None:
    tensors = load_file(first_shard(folder))
    save_file(tensors | {"stray": torch.zeros(1)}, first_shard(folder))


HF: dict[str, tuple[str, Callable[[Path], Any], list[str]]] = {
    "cut off": ("sharded", lambda f: cut(first_shard(f), 5000), ["model-00001-of-", "(5000 bytes) is damaged"]),
    "lost": ("sharded", lambda f: first_shard(f).unlink(), ["shards named in", "not there: model-00001-of-"]),
    "stray": ("sharded", add_to_shard, ["model-00001-of-", "holds besides stray"]),
    "missing": ("hf", edit_tensors(lambda t: t.pop("model.norm.weight")), ["tensors missing: model.norm.weight"]),
    "config": ("hf", edit_config(moe_intermediate_size=40), ["gate_proj.weight is [24, 32], expected [40, 32]"]),
    "nan": ("hf", edit_tensors(poison), [SINGLE, "model.layers.2.mlp.experts.3.up_proj.weight holds NaN"]),
    "family": ("hf", edit_config(model_type="mamba"), ["model_type 'mamba' is not supported; supported are"]),
    "awq": ("hf", edit_config(quantization_config={"quant_method": "awq"}), ["quant_method 'awq'", "high precision"]),
    "pickle": ("hf", as_pickle, ["pickle files (pytorch_model.bin)", "--allow-pickle"]),
    "no config": ("hf", lambda f: (f / "config.json").unlink(), ["config.json does not exist"]),
}


def test_a_wrong_hf_checkpoint_is_named_and_leaves_nothing(good, tmp_path: Path):
    cases = {}
    for name, (kind, spoil, _) in HF.items():
        shutil.copytree(good[kind], tmp_path / "in" / name)
        spoil(tmp_path / "in" / name)
        cases[name] = (tmp_path / "in" / name, tmp_path / "out" / name)
    (tmp_path / "out").mkdir()
    found = run_ranks(1, messages, hf_to_megatron, cases)[0]
    for name, (_, _, parts) in HF.items():
        for part in parts:
            assert part in found[name], (name, found[name])
    assert list((tmp_path / "out").iterdir()) == []


def rewrite_metadata(edit: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        metadata = read_metadata(folder)
        edit(metadata.state_dict_metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def halve(tensors: dict[str, Any]) -> None:
    del tensors["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"].chunks[3]


def flip_exponents(folder: Path) -> None:
    """NaN in the embedding, whose numbers are found by a pattern that no other tensor has."""
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    wanted = load_file(folder.parent.parent / "original" / SINGLE)["model.embed_tokens.weight"].numpy().tobytes()[:64]
    place = bytes(data).index(wanted)
    data[place : place + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(bytes(data))


MEGATRON: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "cut off": (lambda f: cut(f / "__0_0.distcp", 9000), ["__0_0.distcp is cut off: 9000 bytes"]),
    "lost": (lambda f: (f / "__0_0.distcp").unlink(), ["__0_0.distcp does not exist"]),
    "description": (lambda f: cut(f / ".metadata", 900), [".metadata is damaged or refused, nothing of it was run"]),
    "no description": (lambda f: (f / ".metadata").unlink(), [".metadata does not exist"]),
    "missing": (
        rewrite_metadata(lambda t: t.pop("decoder.final_layernorm.weight")),
        ["tensors missing: decoder.final_layernorm.weight"],
    ),
    "extra": (
        rewrite_metadata(lambda t: t.update({"decoder.other.weight": t["decoder.final_layernorm.weight"]})),
        ["decoder.other.weight at [0] has no place"],
    ),
    "in part": (rewrite_metadata(halve), ["linear_fc1.weight", "was it written by a run that did not finish"]),
    "nan": (flip_exponents, ["__0_0.distcp: embedding.word_embeddings.weight holds NaN"]),
    "config": (
        lambda f: edit_config(moe_intermediate_size=40)(f / "hf"),
        ["linear_fc1.weight is [4, 48, 32], expected [4, 80, 32]"],
    ),
    "no hf": (lambda f: shutil.rmtree(f / "hf"), ["--hf", "policy.hf"]),
}


def test_a_wrong_megatron_checkpoint_is_named_and_leaves_nothing(good, tmp_path: Path):
    cases = {}
    shutil.copytree(good["hf"], tmp_path / "original")
    for name, (spoil, _) in MEGATRON.items():
        shutil.copytree(good["megatron"], tmp_path / "in" / name)
        spoil(tmp_path / "in" / name)
        cases[name] = (tmp_path / "in" / name, tmp_path / "out" / name)
    (tmp_path / "out").mkdir()
    found = run_ranks(1, messages, megatron_to_hf, cases)[0]
    for name, (_, parts) in MEGATRON.items():
        for part in parts:
            assert part in found[name], (name, found[name])
    assert list((tmp_path / "out").iterdir()) == []


class Malicious:
    """Unpickled by Python's own loader, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_runs(good, tmp_path: Path):
    shutil.copytree(good["megatron"], tmp_path / "megatron")
    proof = tmp_path / "it ran"
    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(Malicious(proof)))
    with pytest.raises(ValueError, match=r"\.metadata is damaged or refused, nothing of it was run: it asks for posix"):
        read_metadata(tmp_path / "megatron")
    for call in (b"cbuiltins\neval\n(V1\ntR.", b"ctorch\nload\n(V1\ntR.", b"ctorch.distributed.checkpoint\nos\n."):
        (tmp_path / "megatron" / ".metadata").write_bytes(call)
        with pytest.raises(ValueError, match="it asks for"):
            read_metadata(tmp_path / "megatron")
    shutil.copytree(good["hf"], tmp_path / "hf")
    (tmp_path / "hf" / SINGLE).unlink()
    torch.save({"a": Malicious(proof)}, tmp_path / "hf" / "pytorch_model.bin")
    text = run_ranks(1, message, allowed, tmp_path / "hf", tmp_path / "out")[0]
    assert "pytorch_model.bin is damaged, or holds more than tensors, which is never executed" in text
    assert not proof.exists() and not (tmp_path / "out").exists()


def allowed(source: Path, target: Path) -> int:
    return hf_to_megatron(source, target, allow_pickle=True)


def test_a_pickle_of_tensors_is_read_on_request(good, tmp_path: Path):
    shutil.copytree(good["hf"], tmp_path / "hf")
    as_pickle(tmp_path / "hf")
    run_ranks(1, allowed, tmp_path / "hf", tmp_path / "megatron")
    run_ranks(1, megatron_to_hf, tmp_path / "megatron", tmp_path / "back")
    original = load_file(good["hf"] / SINGLE)
    found = {n: t for path in (tmp_path / "back").glob("*.safetensors") for n, t in load_file(path).items()}
    assert found.keys() == original.keys() and all(torch.equal(t, original[n]) for n, t in found.items())


def full(name: str) -> Callable[..., None]:
    def fail(descriptor: int, data: memoryview, offset: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name) and offset > 20_000:
            raise OSError(28, "No space left on device")
        os.pwrite(descriptor, data, offset)

    return fail


def on_full_disk(step: Callable[..., Any], name: str, source: Path, target: Path) -> str:
    from megatron_gspo.convert import dcp_write

    tensor_file.write_all = dcp_write.write_all = full(name)
    return message(step, source, target)


def with_no_room(step: Callable[..., Any], source: Path, target: Path) -> str:
    output.shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000)  # type: ignore[attr-defined]
    return message(step, source, target)


@pytest.mark.parametrize("way", ["megatron", "hf"])
def test_a_full_disk_is_named_by_every_rank_and_leaves_nothing(good, tmp_path: Path, way: str):
    step, source, file = {
        "megatron": (hf_to_megatron, good["hf"], "__1_0.distcp"),
        "hf": (megatron_to_hf, good["megatron"], "model-00001-of-00001.safetensors"),
    }[way]
    for text in run_ranks(2, on_full_disk, step, file, source, tmp_path / "out"):
        assert "No space left on device" in text and f"{file}'" in text and text.count("rank") == 1
    for text in run_ranks(2, with_no_room, step, source, tmp_path / "out"):
        assert "0.00 GB, and 0.00 GB are free on its disk" in text
    assert list(tmp_path.iterdir()) == []


def killed(source: Path, target: Path) -> None:
    written = 0

    def kill(descriptor: int, data: memoryview, offset: int) -> None:
        nonlocal written
        written += len(data)
        if written > 50_000:
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwrite(descriptor, data, offset)

    from megatron_gspo.convert import dcp_write

    dcp_write.write_all = kill
    hf_to_megatron(source, target)


def test_work_that_was_killed_is_begun_anew(good, tmp_path: Path):
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, killed, good["hf"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    assert not (tmp_path / ".out.unfinished" / "metadata.json").exists()  # Megatron would take it for a checkpoint
    run_ranks(1, hf_to_megatron, good["hf"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (text,) = run_ranks(1, message, hf_to_megatron, good["hf"], tmp_path / "out")
    assert "is not an empty directory; remove it or write elsewhere" in text


def while_another_writes(source: Path, target: Path) -> tuple[str, list[str]]:
    """What a conversion says while another one holds `target`, and what is in the other's folder afterwards."""
    with output.whole_folder(target, 0, "the other") as folder:
        (folder / "its own").touch()
        return message(hf_to_megatron, source, target), sorted(path.name for path in folder.iterdir())


def test_two_that_write_one_target_do_not_meet(good, tmp_path: Path):
    """Either used to remove the folder that the other wrote into."""
    ((text, left),) = run_ranks(1, while_another_writes, good["hf"], tmp_path / "out")
    assert f"another process writes {tmp_path / 'out'}" in text
    assert left == [output.LOCK, "its own"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["its own"]


@pytest.mark.parametrize("there", [True, False])
def test_a_target_may_be_a_link_to_an_empty_folder(good, tmp_path: Path, there: bool):
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    if there:
        real.mkdir()
    run_ranks(1, hf_to_megatron, good["hf"], link)
    assert (real / "metadata.json").exists() and link.is_symlink()


def test_words_are_not_taken_for_padding(good, tmp_path: Path):
    """A config with a smaller vocabulary used to cut rows off in silence."""
    shutil.copytree(good["megatron"], tmp_path / "megatron")
    config = tmp_path / "megatron" / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 120}))
    (text,) = run_ranks(1, message, megatron_to_hf, tmp_path / "megatron", tmp_path / "out")
    assert "has 128 rows, config.json a vocab_size of 120; 8 of the rows beyond are not zero" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_hidden_layers", "4", "num_hidden_layers: expected a whole number of at least 1, got '4'"),
        ("num_hidden_layers", 0, "num_hidden_layers: expected a whole number of at least 1, got 0"),
        ("num_experts_per_tok", 9, "num_experts_per_tok: expected at most the 4 experts, got 9"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field(good, tmp_path: Path, field: str, value: Any, text: str):
    shutil.copytree(good["hf"], tmp_path / "hf")
    edit_config(**{field: value})(tmp_path / "hf")
    (found,) = run_ranks(1, message, hf_to_megatron, tmp_path / "hf", tmp_path / "out")
    assert text in found
