"""HF tensors out of any layout: every rank walks the same buckets, and each bucket's sender gets its full tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_gspo.weights.bind import Binding, Bound
from megatron_gspo.weights.claims import Claim
from megatron_gspo.weights.plan import Bucket, ExportPlan, Holding, Item, Part, TensorSpec, assign, buckets, parts
from megatron_gspo.weights.rules import HFTensor

__all__ = ["Bucket", "ExportPlan", "TensorSpec", "buckets", "gather", "parts", "plan_export"]


def plan_export(binding: Binding, dtype: torch.dtype | None = None) -> ExportPlan:
    """The plan of an export in `dtype` (None: each parameter's own). Collective over the world, once: ranks tell each
    other what they hold. The plan stays valid for as long as the model lives.

    Raises ValueError naming HF tensors that not exactly one rank group holds.
    """
    holdings: list[Holding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(holdings, _holding(binding))
    return ExportPlan(assign(binding.claims, [h for h in holdings if h is not None], dtype), binding)


@torch.no_grad()
def gather(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The bucket's HF tensors (name, full tensor on the parameters' device) on its sender; [] on every other rank. Some
    are views of parameters: to be used before these change.

    Collective among the ranks that hold shards of the bucket's items; all of them must walk the buckets in the plan's
    order. Other ranks return at once. The sender holds twice the bucket at its peak. With `overlap_param_gather`, the
    caller first waits for the parameters to be current.
    """
    rank = dist.get_rank()
    ours = {bound.claim.index: bound for bound in bucket.binding.bound if not bound.is_copy}
    lots: dict[tuple[str, torch.dtype], list[Item]] = defaultdict(list)
    shards: dict[int, list[torch.Tensor]] = {}
    for item in bucket.items:
        if rank not in item.ranks:
            continue
        if item.is_gathered:
            lots[item.group, item.dtype].append(item)
        elif rank == bucket.sender:
            indices = [part.claim.index for part in item.parts]
            shards |= {index: [ours[index].parameter.to(item.dtype)] for index in indices}
    for (name, dtype), items in lots.items():
        held = [part for item in items for part in item.parts]
        shards |= _gather_shards(held, ours, dtype, bucket.sender, getattr(bucket.binding.pgs, name))
    if rank != bucket.sender:
        return []
    return [
        pair
        for item in bucket.items
        for pair in assemble((part.claim, shards[part.claim.index]) for part in item.parts)
    ]


def _holding(binding: Binding) -> Holding:
    pgs = binding.pgs
    return Holding(
        rank=dist.get_rank(),
        tp_ranks=tuple(dist.get_process_group_ranks(pgs.tp)),
        etp_ranks=tuple(dist.get_process_group_ranks(pgs.expt_tp)),
        replica=pgs.dp_cp.rank(),
        expert_replica=pgs.expt_dp.rank(),
        dtypes={bound.claim.index: bound.parameter.dtype for bound in binding.bound if not bound.is_copy},
    )


def _gather_shards(
    parts: Sequence[Part], ours: Mapping[int, Bound], dtype: torch.dtype, sender: int, group: dist.ProcessGroup
) -> dict[int, list[torch.Tensor]]:
    """Shards of every part in group order, by claim index, on the sender; {} elsewhere. One collective for all. The
    ranks of a group hold equally many parts, of the same shapes in the same order."""
    rank = dist.get_rank()
    parameters = [ours[part.claim.index].parameter for part in parts if rank in part.ranks]
    rows = [parameter.detach().to(dtype).reshape(-1) for parameter in parameters]
    flat = torch.cat(rows) if len(rows) > 1 else rows[0]
    if rank != sender:
        dist.gather(flat, dst=sender, group=group)
        return {}
    received = [torch.empty_like(flat) for _ in range(group.size())]
    dist.gather(flat, received, dst=sender, group=group)
    shards = defaultdict[int, list[torch.Tensor]](list)
    for holder, numbers in zip(dist.get_process_group_ranks(group), received, strict=True):
        held = [part.claim.index for part in parts if holder in part.ranks]
        split = numbers.split([parameter.numel() for parameter in parameters])
        for index, shard, parameter in zip(held, split, parameters, strict=True):
            shards[index].append(shard.view(parameter.shape))
    return shards


def assemble(held: Iterable[tuple[Claim, Sequence[torch.Tensor]]]) -> list[tuple[str, torch.Tensor]]:
    """The HF tensors (name, full tensor of the shards' dtype and device) that whole parameters make up, each given by
    all of its shards. What is a part of a lone shard as it lies is a view of it."""
    full: dict[str, torch.Tensor] = {}
    for claim, shards in held:
        pieces = [
            (shard, piece)
            for rank, shard in enumerate(shards)
            for piece in claim.rule.pieces(rank, len(shards), tuple(shard.shape))
        ]
        in_one_piece = len(pieces) == len({piece.source for _, piece in pieces}) == len(claim.hf)
        if in_one_piece and not any(is_stacked(tensor) for tensor in claim.hf):
            full |= {claim.hf[piece.source].name: shard[piece.put] for shard, piece in pieces}
            continue
        for shard, piece in pieces:
            tensor = claim.hf[piece.source]
            name, shape = tensor.exported
            if name not in full:
                full[name] = torch.empty(shape, dtype=shard.dtype, device=shard.device)
            _entry(full[name], tensor, claim.expert)[piece.take].copy_(shard[piece.put])
    return list(full.items())


def is_stacked(tensor: HFTensor) -> bool:
    """Whether the tensor leaves inside a stacked one."""
    return tensor.stacked is not None and tensor.stacked.only


def _entry(full: torch.Tensor, tensor: HFTensor, expert: int | None) -> torch.Tensor:
    """The place of `tensor` in the exported tensor `full`, a view."""
    stacked = tensor.stacked
    if stacked is None or not stacked.only or expert is None:
        return full
    entry = full[expert].T if stacked.transposed else full[expert]
    return entry[stacked.row :: stacked.step][: tensor.shape[0]]
