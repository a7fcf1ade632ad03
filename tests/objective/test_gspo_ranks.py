"""GSPO over real context-parallel ranks: shares add up to the one-rank result, at the price of one small all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_gspo.batch.shard import MicroBatch, shard
from megatron_gspo.batch.trajectory import Trajectories
from megatron_gspo.objective import gspo_loss, reduce_metrics
from tests.objective.oracle import Case, cases
from tests.objective.packed import packed_loss
from tests.ranks import run_ranks

COLLECTIVES = ["all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter_tensor"]


def shard_of(case: Case, cp: int, cp_rank: int) -> MicroBatch:
    """The case's rows behind prompts of 1 to 5 tokens; a response token's id is 1 + its place in all of them."""
    prompts = [1 + i % 5 for i in range(case.n)]
    lens = torch.tensor([prompt + row.numel() for prompt, row in zip(prompts, case.new, strict=True)])
    first = torch.tensor([0, *(row.numel() for row in case.new)]).cumsum(0) + 1
    tokens, mask = [], []
    for i, prompt in enumerate(prompts):
        tokens.append(torch.cat([torch.zeros(prompt, dtype=torch.int64), torch.arange(first[i], first[i + 1])]))
        mask.append(torch.cat([torch.zeros(prompt, dtype=torch.bool), case.mask[i]]))
    trajectories = Trajectories(
        rows=torch.arange(case.n),
        offsets=torch.cat([torch.tensor([0]), lens.cumsum(0)]),
        tokens=torch.cat(tokens),
        loss_mask=torch.cat(mask),
        logprobs=torch.zeros(int(lens.sum())),
        versions=torch.zeros(int(lens.sum()), dtype=torch.int64),
    )
    padded = -(-(int(lens.sum()) + 2 * cp * case.n) // (2 * cp)) * 2 * cp
    return shard(trajectories, range(case.n), padded_length=padded, cp=cp, cp_rank=cp_rank)


def one_rank(name: str) -> dict[str, Any]:
    """What this rank holds of the loss, the gradient of all response tokens and the metrics; and what it sent."""
    case = cases()[name]
    sent: list[tuple[str, list[int], torch.dtype]] = []

    def counted(kind: str, original):
        def collective(tensor, *args, **kwargs):
            sent.append((kind, list(tensor.shape), tensor.dtype))
            return original(tensor, *args, **kwargs)

        return collective

    part = shard_of(case, dist.get_world_size(), dist.get_rank())
    place = torch.where(part.loss_mask, part.labels - 1, 0)
    logp = torch.where(part.loss_mask, torch.cat(case.new)[place], torch.nan).requires_grad_()
    originals = {kind: getattr(dist, kind) for kind in COLLECTIVES}
    for kind, original in originals.items():
        setattr(dist, kind, counted(kind, original))
    loss, metrics = gspo_loss(
        logp,
        torch.where(part.loss_mask, torch.cat(case.old)[place], torch.nan),
        part.loss_mask,
        part.offsets,
        case.trained_lens,
        case.advantages,
        rows=part.rows,
        num_sequences=case.n,
        group=dist.group.WORLD,
        **case.clip,
    )
    loss.backward()
    for kind, original in originals.items():
        setattr(dist, kind, original)
    return {
        "loss": loss.item(),
        "gradient": torch.zeros(torch.cat(case.new).numel()).double().index_add(0, place, logp.grad).tolist(),
        "metrics": reduce_metrics(metrics, dp_cp_group=dist.group.WORLD, dp_group=None, device="cpu"),
        "sent": sent,
    }


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", ["c00_basic", "c02_off_policy", "c05_len1_vs_long", "c19_holes", "c22_bad_valid"])
def test_shares_add_up_and_cost_one_all_reduce(name: str, cp: int):
    case = cases()[name]
    loss, gradient, metrics = packed_loss(case)
    ranks = run_ranks(cp, one_rank, name)
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss.item(), rel=1e-12, abs=1e-15)
    total = torch.tensor([rank["gradient"] for rank in ranks], dtype=torch.float64).sum(0)
    torch.testing.assert_close(total, torch.cat(gradient), rtol=1e-12, atol=1e-16)
    expected = reduce_metrics(metrics, dp_cp_group=None, dp_group=None, device="cpu")
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected, rel=1e-12)
        assert rank["sent"] == [("all_reduce", [case.n], torch.float64)]
