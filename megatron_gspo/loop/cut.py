"""Cuts a step's batch into this rank's micro-batches, and moves per-token numbers between the batch and its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.batch.pack import MiniBatch, Plan, plan_batch
from megatron_gspo.batch.shard import MicroBatch, shard
from megatron_gspo.batch.trajectory import Trajectories, TrajectoryIndex
from megatron_gspo.config import BatchConfig
from megatron_gspo.loop.source import Batch
from megatron_gspo.policy.flops import attention_cost
from megatron_gspo.policy.layout import Layout


@dataclass(frozen=True)
class Cut:
    """One mini-batch as this rank trains it."""

    plan: MiniBatch
    micro_batches: list[MicroBatch]
    num_tokens: int  # prompt and response tokens of the mini-batch, over all ranks


def make_plan(
    index: TrajectoryIndex, config: BatchConfig, layout: Layout, hf_config: dict[str, Any], num_further: int = 0
) -> Plan:
    """The batch's packing plan: the same on every rank, since it follows from lengths alone. `num_further`: of
    multi-token-prediction layers that train."""
    return plan_batch(
        index.lens,
        index.group,
        mini_batches=config.mini_batches,
        dp=layout.dp,
        max_tokens=config.max_tokens,
        cp=layout.cp,
        length_multiple=2 * layout.cp * layout.tp,
        micro_batch_multiple=layout.pp if layout.vpp > 1 else 1,
        attention_cost=attention_cost(hf_config, num_further),
    )


def _my_rows(plan: MiniBatch, layout: Layout) -> list[int]:
    return [row for rows in plan.micro_batches[layout.dp_rank] for row in rows]


def cut_batch(batch: Batch, plan: Plan, layout: Layout, device: torch.device) -> list[Cut]:
    """This rank's micro-batches of every mini-batch; only its own rows are read."""
    mine = batch.rows([row for mini_batch in plan.mini_batches for row in _my_rows(mini_batch, layout)])
    return [
        Cut(
            plan=mini_batch,
            micro_batches=_shard_all(mine, mini_batch, layout, device),
            num_tokens=int(batch.index.lens[list(mini_batch.rows)].sum()),
        )
        for mini_batch in plan.mini_batches
    ]


def _shard_all(mine: Trajectories, plan: MiniBatch, layout: Layout, device: torch.device) -> list[MicroBatch]:
    return [
        shard(mine, rows, padded_length=plan.padded_length, cp=layout.cp, cp_rank=layout.cp_rank).to(device)
        for rows in plan.micro_batches[layout.dp_rank]
    ]


def gather_tokens(
    cuts: Sequence[Cut], values: Sequence[Sequence[Tensor]], index: TrajectoryIndex, layout: Layout
) -> Tensor:
    """[sum of lens] float32 on the CPU of every rank: a number for every token of the batch, 0 where none trains.

    `values[k][j]` is [t] for mini-batch k, micro-batch j on the last pipeline stage, where labels are. Collective.
    """
    device = cuts[0].micro_batches[0].tokens.device
    flat = torch.zeros(int(index.lens.sum()), dtype=torch.float32, device=device)
    if layout.is_last_stage:
        for cut, scored in zip(cuts, values, strict=True):
            for micro_batch, local in zip(cut.micro_batches, scored, strict=True):
                flat[_places(micro_batch, index)] = local[micro_batch.loss_mask].float()
    dist.all_reduce(flat, group=layout.pgs.dp_cp)
    dist.broadcast(flat, group=layout.pgs.pp, group_src=layout.pp - 1)
    return flat.cpu()


def spread_tokens(flat: Tensor, cuts: Sequence[Cut], index: TrajectoryIndex) -> list[list[Tensor]]:
    """The inverse of `gather_tokens` for this rank's micro-batches: [t] each, in the dtype of `flat`."""
    assert len(flat) == index.lens.sum(), "these numbers belong to another batch"
    return [[_spread(flat, micro_batch, index) for micro_batch in cut.micro_batches] for cut in cuts]


def _spread(flat: Tensor, micro_batch: MicroBatch, index: TrajectoryIndex) -> Tensor:
    mine = flat[_places(micro_batch, index).cpu()].to(micro_batch.tokens.device)
    zeros = torch.zeros(micro_batch.loss_mask.shape, dtype=flat.dtype, device=mine.device)
    return zeros.masked_scatter_(micro_batch.loss_mask, mine)


def _places(micro_batch: MicroBatch, index: TrajectoryIndex) -> Tensor:
    """[k] int64: where the k trained labels of a micro-batch stand among all tokens of the batch, row after row."""
    starts = (index.lens.cumsum(0) - index.lens)[micro_batch.rows.cpu()].to(micro_batch.tokens.device)
    used = int(micro_batch.offsets[-1])
    labels = torch.repeat_interleave(starts, micro_batch.offsets.diff()) + micro_batch.position_ids[0, :used] + 1
    return labels[micro_batch.loss_mask[:used]]
