"""Checkpoints in torch's pickle format: refused, or on request read by torch.load(weights_only=True) and mapped."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.rules import Shape
from megatron_gspo.weights.tensor_file import Slices, bounds_of, is_finite

INDEX, SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_pickle(path: Path) -> bool:
    return path.suffix in SUFFIXES


def refuse(directory: Path) -> None:
    """Raises ValueError where `directory` holds pickle files; says how to get at them."""
    found = sorted(path.name for path in directory.glob("*") if is_pickle(path))
    if found:
        raise ValueError(
            f"{directory} holds its weights as pickle files ({listing(found, 3)}), which can run code when they are "
            "loaded. Take the safetensors files of the same model, or pass --allow-pickle to read "
            f"{SINGLE} with weights_only=True, which runs nothing"
        )


@dataclass(frozen=True)
class _Loaded:
    """A tensor of a mapped pickle file, read as `TensorFile` reads."""

    path: Path
    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read_into(self, region: Slices, out: torch.Tensor) -> None:
        bounds_of(region, self.shape, self.name)
        part = self.tensor[tuple(region)]
        if part.numel() and part.is_floating_point() and not is_finite(part):
            raise ValueError(f"{self.path}: {self.name} holds NaN or infinity; the checkpoint is damaged")
        out.copy_(part)


class PickleFile:
    """A file of tensors by name. Raises ValueError naming a file that holds anything else."""

    def __init__(self, path: Path):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:  # torch's words advise to read it without the guard
            raise ValueError(
                f"{path} is damaged, or holds more than tensors, which is never executed; take the model's safetensors"
            ) from error
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"{path} is damaged: {str(error)[:300]}; copy it again") from error
        if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            raise ValueError(f"{path} holds no plain dictionary of tensors")
        self.tensors = {name: _Loaded(path, name, tensor) for name, tensor in loaded.items()}

    def close(self) -> None:
        self.tensors.clear()
