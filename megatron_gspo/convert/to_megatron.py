"""An HF checkpoint as a Megatron distributed checkpoint (torch_dist), which loads in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.convert.dcp_write import DcpFile, Written, write_metadata
from megatron_gspo.convert.skeleton import Entry, Skeleton, skeleton
from megatron_gspo.convert.world import Progress, ahead, shares
from megatron_gspo.weights.hf_folder import write_carried
from megatron_gspo.weights.load import Place, locate, read_shard
from megatron_gspo.weights.output import agree, attempt, whole_folder, write_json
from megatron_gspo.weights.source import CONFIG, HFCheckpoint, read_json

HF_FOLDER = "hf"  # inside the Megatron checkpoint: what it cannot hold itself
FAILED = "writing the Megatron checkpoint"
COMMON = "common_state/shard_0_1"  # where Megatron keeps what is no tensor
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "keep": None}


def hf_to_megatron(source: Path, target: Path, *, dtype: str = "keep", allow_pickle: bool = False) -> int:
    """Writes `target`; returns the bytes of its tensors. Collective over the world.

    Every tensor of `source` and every parameter is accounted for before anything is written. `dtype` keep: each
    parameter in the dtype of its HF tensors (of an FP8 checkpoint: bf16). Memory holds the largest parameter.
    Raises ValueError for a checkpoint that is damaged or does not match its config.json, RuntimeError for what goes
    wrong while writing, on every rank; `target` then does not exist.
    """
    hf_config = read_json(source / CONFIG, "an object") if (source / CONFIG).exists() else None
    if hf_config is None:
        raise FileNotFoundError(f"{source / CONFIG} does not exist; expected the folder of an HF checkpoint")
    with HFCheckpoint(source, allow_pickle=allow_pickle) as checkpoint:
        model = skeleton(hf_config)
        checkpoint.verify()
        places = locate(checkpoint, model.binding)
        dtypes = [_dtype(entry, places[entry.bound.claim.index], checkpoint, DTYPES[dtype]) for entry in model.entries]
        sizes = [entry.numel * kind.itemsize for entry, kind in zip(model.entries, dtypes, strict=True)]
        with whole_folder(target, sum(sizes), FAILED) as folder:
            rank = dist.get_rank()
            own = [
                (entry, kind)
                for entry, kind, owner in zip(model.entries, dtypes, shares(sizes), strict=True)
                if owner == rank
            ]
            written: list[Written] = []
            agree(attempt(partial(_write_tensors, folder, model, checkpoint, places, own, written)), FAILED)
            everyone: list[list[Written]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, written)
            finish = partial(_finish, folder, checkpoint, model, [one for part in everyone for one in part])
            agree(attempt(finish) if rank == 0 else None, FAILED)
    return sum(sizes)


def _dtype(entry: Entry, places: Sequence[Place], checkpoint: HFCheckpoint, wanted: torch.dtype | None) -> torch.dtype:
    if entry.keeps_fp32:
        return torch.float32
    kinds = {checkpoint.dtype(place.name) if checkpoint.is_plain(place.name) else torch.bfloat16 for place in places}
    if wanted is None and len(kinds) != 1:
        raise ValueError(
            f"{checkpoint.directory}: {', '.join(place.name for place in places)} make one Megatron parameter and have "
            f"several dtypes; name one with --dtype"
        )
    return wanted or kinds.pop()


def _write_tensors(
    folder: Path,
    model: Skeleton,
    checkpoint: HFCheckpoint,
    places: Sequence[Sequence[Place]],
    own: Sequence[tuple[Entry, torch.dtype]],
    written: list[Written],
) -> None:
    progress = Progress("converting", sum(entry.numel * dtype.itemsize for entry, dtype in own))
    rank = dist.get_rank()
    with DcpFile(folder / f"__{rank}_0.distcp") as file:
        own = sorted(own, key=lambda one: checkpoint.where(places[one[0].bound.claim.index][0].name))
        for entry, dtype in ahead(own, partial(_prefetch, checkpoint, places)):
            parameter = torch.empty(entry.bound.parameter.shape, dtype=dtype)
            read_shard(checkpoint, places[entry.bound.claim.index], entry.bound, parameter)
            for region in entry.regions:
                file.add_tensor(region.key, region.of(parameter), region.global_shape, region.offsets)
            progress.add(parameter.nbytes)
        if rank == 0:
            for key in model.objects:
                file.add_object(key, [None])
            file.add_object(COMMON, [{"content_metadata": _content()}])
        written += file.written


def _prefetch(checkpoint: HFCheckpoint, places: Sequence[Sequence[Place]], one: tuple[Entry, torch.dtype]) -> int:
    entry, dtype = one
    for place in places[entry.bound.claim.index]:
        if place.expert is None:  # a stacked tensor holds much more than this entry
            checkpoint.prefetch(place.name)
    return entry.numel * dtype.itemsize


def _content() -> dict[str, Any]:
    return {"format": 1, "sharding": "none", "made_by": "hf_to_megatron"}


def _finish(folder: Path, checkpoint: HFCheckpoint, model: Skeleton, written: Sequence[Written]) -> None:
    write_carried(folder / HF_FOLDER, checkpoint, model.binding)
    write_metadata(folder, written)
    # Last: Megatron takes a folder that has it for a whole checkpoint.
    write_json(folder / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
