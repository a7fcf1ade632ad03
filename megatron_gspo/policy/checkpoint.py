"""Parameters, optimizer, schedule and RNG of a trained model in Megatron's torch_dist format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.utils import unwrap_model

from megatron_gspo.policy.layout import Layout

# Optimizer state is kept as each rank's buffers hold it: quick to write, and loadable on the same layout.
_SHARDING = "dp_reshardable"


def _metadata(layout: Layout) -> dict[str, Any]:
    return {
        "dp_cp_group": layout.pgs.dp_cp,
        "distrib_optim_sharding_type": _SHARDING,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _rng_state(layout: Layout) -> ShardedObject:
    state = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    shape = (layout.pp, layout.tp, layout.cp, layout.dp)
    offset = (layout.pp_rank, layout.tp_rank, layout.cp_rank, layout.dp_rank)
    return ShardedObject("rng_state", state, shape, offset, replica_id=0)


def _sharded_state(chunks: Sequence[torch.nn.Module], optimizer, scheduler, layout: Layout, *, loading: bool) -> dict:
    metadata = _metadata(layout)
    models = unwrap_model(list(chunks))
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    state = {name: model.sharded_state_dict(metadata=metadata) for name, model in zip(names, models, strict=True)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    state["scheduler"] = scheduler.state_dict()
    state["rng"] = _rng_state(layout)
    return state


def save_model(directory: Path, chunks: Sequence[torch.nn.Module], optimizer, scheduler, layout: Layout) -> None:
    """Write a model's whole training state into the existing, empty `directory`. Collective over all ranks."""
    state = _sharded_state(chunks, optimizer, scheduler, layout, loading=False)
    dist_checkpointing.save(state, str(directory), content_metadata=_content(layout))


def load_model(directory: Path, chunks: Sequence[torch.nn.Module], optimizer, scheduler, layout: Layout) -> None:
    """Restore what `save_model` wrote, in place. Collective over all ranks.

    Raises ValueError when the checkpoint was written on another layout, since the optimizer state is kept per buffer.
    """
    written = dist_checkpointing.load_content_metadata(str(directory))
    if written != _content(layout):
        raise ValueError(
            f"{directory} was written on layout {written}, this run has {_content(layout)}; resume on the same layout, "
            "or start a new run from an HF checkpoint (policy.hf), which tools/megatron_to_hf.py makes of this one"
        )
    state = _sharded_state(chunks, optimizer, scheduler, layout, loading=True)
    loaded = dist_checkpointing.load(state, str(directory))
    models = unwrap_model(list(chunks))
    for number, model in enumerate(models):
        model.load_state_dict(loaded["model" if len(models) == 1 else f"model{number}"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"]["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(loaded["rng"]["tracker"])
    if "cuda" in loaded["rng"]:
        torch.cuda.set_rng_state(loaded["rng"]["cuda"])


def _content(layout: Layout) -> dict[str, Any]:
    sizes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return {"format": 1, "sharding": _SHARDING} | {name: getattr(layout, name) for name in sizes}
