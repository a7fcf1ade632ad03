"""Checkpoints of both kinds, as tests make and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_gspo.config.schema import Dtype, LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.load import load_hf
from tests.weights.models import built


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By the safetensors library."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names that are missing on a side, or whose dtype or numbers differ."""
    names = one.keys() ^ other.keys()
    both = one.keys() & other.keys()
    return sorted(names | {n for n in both if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])})


def sharded_state(model: Any, layout: Any) -> dict[str, Any]:
    metadata = {"dp_cp_group": layout.pgs.dp_cp, "singleton_local_shards": False}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model.chunks)}


def load_by_megatron(hf: Path, megatron: Path, layout_config: LayoutConfig, dtype: Dtype) -> tuple[int, list[str]]:
    """Loads `megatron` with Megatron's own dist_checkpointing on this rank; (parameters, those that differ from what
    load_hf puts there)."""
    from megatron.core import dist_checkpointing

    with built(hf, layout_config, dtype) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        load_hf(hf, binding)
        wanted = [bound.parameter.clone() for bound in binding.bound]
        for bound in binding.bound:
            bound.parameter.data.fill_(7)
        loaded = dist_checkpointing.load(sharded_state(model, layout), str(megatron))
        for i, chunk in enumerate(model.chunks):
            chunk.load_state_dict(loaded[f"model{i}"])
        pairs = zip(binding.bound, wanted, strict=True)
        return len(wanted), [bound.name for bound, value in pairs if not torch.equal(bound.parameter, value)]


def save_by_megatron(hf: Path, megatron: Path, layout_config: LayoutConfig) -> None:
    """Loads `hf` on this rank and lets Megatron's own dist_checkpointing save it."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    with built(hf, layout_config) as (model, layout):
        load_hf(hf, bind(model.chunks, model.hf_config, layout.pgs))
        if dist.get_rank() == 0:
            megatron.mkdir()
        dist.barrier()
        dist_checkpointing.save(sharded_state(model, layout), str(megatron))
