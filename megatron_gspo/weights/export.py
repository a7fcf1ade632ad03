"""HF tensors out of any layout: every rank walks the same buckets, and each bucket's sender gets its full tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_gspo.weights.bind import Binding, Bound
from megatron_gspo.weights.plan import Bucket, ExportPlan, Holding, Item, TensorSpec, assign, buckets, parts

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
    """The bucket's HF tensors (name, full tensor on the parameters' device, the caller's to keep) on its sender; [] on
    every other rank.

    Collective among the ranks that hold shards of the bucket's items; all of them must walk the buckets in the plan's
    order. Other ranks return at once. The sender holds twice the bucket at its peak. With `overlap_param_gather`, the
    caller first waits for the parameters to be current.
    """
    rank = dist.get_rank()
    ours = {bound.claim.index: bound for bound in bucket.binding.bound if not bound.is_copy}
    lots: dict[tuple[bool, torch.dtype], list[Item]] = defaultdict(list)
    shards: dict[int, list[torch.Tensor]] = {}
    for item in bucket.items:
        if rank not in item.ranks:
            continue
        if item.claim.rule.is_cut and len(item.ranks) > 1:
            lots[item.claim.is_expert, item.dtype].append(item)
        elif rank == bucket.sender:
            shards[item.claim.index] = [ours[item.claim.index].parameter.to(item.dtype)]
    for (is_expert, dtype), items in lots.items():
        group = bucket.binding.pgs.expt_tp if is_expert else bucket.binding.pgs.tp
        shards |= _gather_shards([ours[item.claim.index] for item in items], dtype, bucket.sender, group)
    if rank != bucket.sender:
        return []
    return [pair for item in bucket.items for pair in _assemble(item, shards[item.claim.index])]


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
    entries: Sequence[Bound], dtype: torch.dtype, sender: int, group: dist.ProcessGroup
) -> dict[int, list[torch.Tensor]]:
    """Shards of every entry in group order, by claim index, on the sender; {} elsewhere. One collective for all."""
    parameters = [entry.parameter for entry in entries]
    flat = torch.cat([parameter.to(dtype).reshape(-1) for parameter in parameters])
    if dist.get_rank() != sender:
        dist.gather(flat, dst=sender, group=group)
        return {}
    received = [torch.empty_like(flat) for _ in range(group.size())]
    dist.gather(flat, received, dst=sender, group=group)
    split = [part.split([parameter.numel() for parameter in parameters]) for part in received]
    return {
        entry.claim.index: [part[i].view(entry.parameter.shape) for part in split] for i, entry in enumerate(entries)
    }


def _assemble(item: Item, shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    rule = item.claim.rule
    full = [torch.empty(spec.shape, dtype=spec.dtype, device=shards[0].device) for spec in item.tensors]
    for rank, shard in enumerate(shards):
        for piece in rule.pieces(rank, len(shards), tuple(shard.shape)):
            full[piece.source][piece.take].copy_(shard[piece.put])
    return [(spec.name, tensor) for spec, tensor in zip(item.tensors, full, strict=True)]
