"""Regions of tensors out of files, and files written tensor by tensor, against the safetensors library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.weights import tensor_file
from megatron_gspo.weights.safetensors_file import SafetensorsFile, SafetensorsWriter, Spec

REGIONS = [
    (),
    (slice(3, 9),),
    (slice(None), slice(2, 5)),
    (slice(4, 5), slice(0, 7), slice(1, 3)),
    (2,),
    (11, slice(1, 4), slice(2, 5)),
    (slice(5, 5),),
]


@pytest.mark.parametrize("chunk_bytes", [16, 100, 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_region_is_what_indexing_gives(tmp_path: Path, monkeypatch, chunk_bytes: int, dtype: torch.dtype):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk_bytes)  # smaller than a row, than the tensor, larger
    whole = torch.randn(12, 7, 5).to(dtype)
    save_file({"a": torch.zeros(3, dtype=dtype), "x": whole}, tmp_path / "f")
    stored = SafetensorsFile(tmp_path / "f").tensors["x"]
    for region in REGIONS:
        for target in (dtype, torch.float64):
            out = torch.full_like(whole[region], 7, dtype=target)
            stored.read_into(region, out)
            assert torch.equal(out, whole[region].to(target)), region
        view = torch.zeros(*whole[region].shape, 2, dtype=dtype)[..., 1]  # strided
        stored.read_into(region, view)
        assert torch.equal(view, whole[region])
    for wrong in ((slice(0, 13),), (12,), (slice(None),) * 4):
        with pytest.raises(ValueError, match=r"x of shape \[12, 7, 5\] has no"):
            stored.read_into(wrong, torch.zeros(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_not_finite_is_named_where_it_is_read(tmp_path: Path, value: float, dtype: torch.dtype):
    bad = torch.randn(40, 8).to(dtype)
    bad[33, 5] = value
    save_file({"x": bad}, tmp_path / "f")
    stored = SafetensorsFile(tmp_path / "f").tensors["x"]
    stored.read_into((slice(0, 33),), torch.zeros(33, 8))
    for region, shape in (((), (40, 8)), ((slice(None), slice(4, 6)), (40, 2))):
        with pytest.raises(ValueError, match=r"/f: x holds NaN or infinity"):
            stored.read_into(region, torch.zeros(shape, dtype=dtype))


def test_the_safetensors_library_reads_what_is_streamed(tmp_path: Path):
    tensors = {
        "odd": torch.randn(3).bfloat16(),  # 6 bytes: what follows would not be aligned
        "wide": torch.randn(5, 4),
        "codes": torch.randn(7).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "transposed": torch.randn(4, 6).t(),
    }
    specs = [Spec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(tmp_path / "f", specs) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name].double(), tensor.double()), name


def test_a_tensor_left_out_or_another_shape_leaves_no_file(tmp_path: Path):
    specs = [Spec("a", torch.float32, (2,)), Spec("b", torch.float32, (3,))]
    with pytest.raises(AssertionError, match="never written: b"), SafetensorsWriter(tmp_path / "f", specs) as writer:
        writer.write("a", torch.zeros(2))
    (tmp_path / "f").unlink()
    with pytest.raises(AssertionError, match="b is"), SafetensorsWriter(tmp_path / "f", specs) as writer:
        writer.write("b", torch.zeros(2))
    assert not (tmp_path / "f").exists()


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    edits = {
        "no header": whole[:4],
        "cut off": whole[:-3],
        "longer": whole + b"\0",
        "header length": (2**40).to_bytes(8, "little") + whole[8:],
        "no JSON": whole[:8] + b"!" * length + whole[8 + length :],
        "offsets": whole.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'),
        "dtype": whole.replace(b'"F32"', b'"F99"'),
    }
    path.write_bytes(edits[how])


@pytest.mark.parametrize("how", ["no header", "cut off", "longer", "header length", "no JSON", "offsets", "dtype"])
def test_a_damaged_file_is_named(tmp_path: Path, how: str):
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.zeros(8)}, path)
    damage(path, how)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=r"f.safetensors \(\d+ bytes\) is damaged or no safetensors file: .*; copy it"):
        SafetensorsFile(path)
    assert len(os.listdir("/proc/self/fd")) == before
