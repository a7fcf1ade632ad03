"""Cuts a step's batch into this rank's micro-batches, and moves per-token numbers between the batch and its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


def make_plan(index: TrajectoryIndex, config: BatchConfig, layout: Layout, hf_config: dict[str, Any]) -> Plan:
    """The batch's packing plan: the same on every rank, since it follows from lengths alone."""
    return plan_batch(
        index.lens,
        index.group,
        mini_batches=config.mini_batches,
        dp=layout.dp,
        max_tokens=config.max_tokens,
        cp=layout.cp,
        length_multiple=2 * layout.cp * layout.tp,
        micro_batch_multiple=layout.pp if layout.vpp > 1 else 1,
        attention_cost=attention_cost(hf_config),
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


def gather_logp(
    cuts: Sequence[Cut], logp: Sequence[Sequence[Tensor]], index: TrajectoryIndex, layout: Layout
) -> Tensor:
    """[sum of lens] float32 on every rank: the log-probability of every token of the batch, 0 where none was scored.

    `logp[k][j]` is [t] for mini-batch k, micro-batch j on the last pipeline stage (empty elsewhere). Collective.
    """
    starts = index.lens.cumsum(0) - index.lens
    device = cuts[0].micro_batches[0].tokens.device
    flat = torch.zeros(int(index.lens.sum()), dtype=torch.float32, device=device)
    for cut, scored in zip(cuts, logp, strict=True):
        for micro_batch, values in zip(cut.micro_batches, scored, strict=layout.is_last_stage):
            lens = micro_batch.offsets.diff()
            document_start = torch.repeat_interleave(starts[micro_batch.rows.cpu()].to(device), lens)
            used = int(micro_batch.offsets[-1])
            place = document_start + micro_batch.position_ids[0, :used] + 1
            trains = micro_batch.loss_mask[:used]
            flat[place[trains]] = values[:used][trains]
    dist.all_reduce(flat, group=layout.pgs.dp_cp)
    dist.broadcast(flat, group=layout.pgs.pp, group_src=layout.pp - 1)
    return flat.cpu()


def spread_logp(flat: Tensor, batch: Batch, cuts: Sequence[Cut], layout: Layout) -> list[list[Tensor]]:
    """The inverse of `gather_logp` for this rank's micro-batches: [t] each, on the labels' positions."""
    assert len(flat) == batch.index.lens.sum(), "old log-probabilities belong to another batch"
    starts = batch.index.lens.cumsum(0) - batch.index.lens
    result = []
    for cut in cuts:
        rows = _my_rows(cut.plan, layout)
        mine = batch.rows(rows)
        place = torch.cat([starts[row] + torch.arange(int(batch.index.lens[row])) for row in rows] or [starts[:0]])
        mine = replace(mine, logprobs=flat[place])
        device = cut.micro_batches[0].tokens.device
        result.append([part.rollout_logprobs for part in _shard_all(mine, cut.plan, layout, device)])
    return result
