"""The family over real context-parallel ranks: shares add up to the one-rank result, for a small all-reduce."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gspo.batch.shard import MicroBatch, shard
from megatron_gspo.batch.trajectory import Trajectories
from megatron_gspo.objective import (
    Tokens,
    icepop,
    off_policy_sequence_mask,
    policy_loss,
    reduce_metrics,
    sequence_mask,
    token_weights,
    truncated_importance_sampling,
)
from tests.objective.batch import Batch, random_batch
from tests.objective.family import FAMILY
from tests.objective.packed import evaluate, totals_of
from tests.ranks import run_ranks

CORRECTIONS = [
    ("truncate", partial(truncated_importance_sampling, level="sequence_product", high=1.2)),
    ("icepop", partial(icepop, level="token", low=0.8, high=1.2)),
    ("sequence_mask", partial(sequence_mask, low=0.9, high=1.1)),
    ("opsm", partial(off_policy_sequence_mask, delta=0.02)),
]
# member -> (what it runs with, what it sends per micro-batch of m sequences: rows of [m] float64 in each all-reduce)
RUNS: dict[str, tuple[str, bool, dict[str, Any], list[int]]] = {
    **{name: (name, False, {}, [1]) for name in FAMILY if name not in ("gmpo", "minirl")},
    "gmpo": ("gmpo", False, {}, [1, 1]),
    "minirl": ("minirl", True, {}, [2]),
    "gspo with corrections": ("gspo", True, {"corrections": CORRECTIONS}, [2]),
    "grpo with corrections and a penalty": ("grpo", True, {"corrections": CORRECTIONS, "kl": ("k3", 0.1)}, [2]),
    "gmpo with corrections": ("gmpo", True, {"corrections": CORRECTIONS}, [2, 1]),
}


class Collectives(TorchDispatchMode):
    """Records (name, bytes) of every collective of torch.distributed, whatever Python function it was called by."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.sent.append((func._schema.name, sum(x.numel() * x.element_size() for x in tensors)))
        return func(*args, **kwargs or {})


def shard_of(batch: Batch, cp: int, cp_rank: int) -> MicroBatch:
    """The rows behind prompts of 1 to 5 tokens; a response token's id is 1 + its place among all of them."""
    prompts = [1 + i % 5 for i in range(len(batch.new))]
    lens = torch.tensor([prompt + row.numel() for prompt, row in zip(prompts, batch.new, strict=True)])
    first = torch.tensor([0, *(row.numel() for row in batch.new)]).cumsum(0) + 1
    tokens, mask = [], []
    for i, prompt in enumerate(prompts):
        tokens.append(torch.cat([torch.zeros(prompt, dtype=torch.int64), torch.arange(first[i], first[i + 1])]))
        mask.append(torch.cat([torch.zeros(prompt, dtype=torch.bool), batch.mask[i]]))
    total = int(lens.sum())
    trajectories = Trajectories(
        rows=torch.arange(len(lens)),
        offsets=torch.cat([torch.tensor([0]), lens.cumsum(0)]),
        tokens=torch.cat(tokens),
        loss_mask=torch.cat(mask),
        logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int64),
    )
    padded = -(-(total + 2 * cp * len(lens)) // (2 * cp)) * 2 * cp
    return shard(trajectories, range(len(lens)), padded_length=padded, cp=cp, cp_rank=cp_rank)


def one_rank(batch: Batch) -> dict[str, dict[str, Any]]:
    """Of every run: this rank's share of the loss and of the gradient of all rows, the metrics, and what it sent."""
    part = shard_of(batch, dist.get_world_size(), dist.get_rank())
    place = torch.where(part.loss_mask, part.labels - 1, 0)
    lens = torch.stack([mask.sum() for mask in batch.mask])

    def local(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.where(part.loss_mask, torch.cat(rows)[place], torch.nan)

    results = {}
    for run, (name, uses_rollout, options, _) in RUNS.items():
        member = FAMILY[name]
        tokens = Tokens(
            logp=local(batch.new).requires_grad_(),
            old_logp=local(batch.old),
            rollout_logp=local(batch.rollout) if uses_rollout else None,
            ref_logp=local(batch.ref) if "kl" in options else None,
            mask=part.loss_mask,
            offsets=part.offsets,
            trained_lens=lens,
            rows=part.rows,
            advantages=local(batch.token_advantages) if member.token_advantages else batch.advantages,
            group=dist.group.WORLD,
        )
        weights = token_weights(member.aggregation, lens, totals_of(tokens))
        with Collectives() as collectives:
            loss, metrics = policy_loss(tokens, member.objective, weights, **options)
            loss.backward()
        gradient = torch.zeros(torch.cat(batch.new).numel(), dtype=torch.float64).index_add(0, place, tokens.logp.grad)
        results[run] = {
            "loss": loss.item(),
            "gradient": gradient,
            "metrics": reduce_metrics(metrics, dp_cp_group=dist.group.WORLD, dp_group=None, device="cpu"),
            "sent": collectives.sent,
            "trained": int(part.loss_mask.sum()),
        }
    return results


def bad_values() -> Batch:
    """Row 0 has a bad value in one token, so in one rank's share; row 2 a new probability of 0."""
    batch = random_batch((9, 12, 7))
    batch.new[0][4], batch.mask[0][4] = torch.nan, True
    batch.new[2][3], batch.mask[2][3] = -torch.inf, True
    return batch


def nothing_trained() -> Batch:
    batch = random_batch((6, 5))
    return replace(batch, mask=[torch.zeros_like(row) for row in batch.mask])


BATCHES = {
    "ragged": random_batch((11, 3, 26, 1, 8, 17)),
    "long": random_batch((3000, 1, 700, 90, 2, 41)),
    "one token": random_batch((1,)),
    "bad values": bad_values(),
    "nothing trained": nothing_trained(),
}


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", BATCHES)
def test_shares_add_up_and_cost_as_many_bytes_as_there_are_sequences(kind: str, cp: int):
    """A float64 for each sequence, whatever the token count, and never on a condition that ranks may not share.

    Sums over ranks round differently from those over one: by a few 2^-53 of their size.
    """
    batch = BATCHES[kind]
    ranks = run_ranks(cp, one_rank, batch)
    trained = [rank["gspo"]["trained"] for rank in ranks]
    assert sum(trained) == sum(int(mask.sum()) for mask in batch.mask)
    if kind in ("one token", "nothing trained"):
        assert min(trained) == 0  # a rank without a response token
    for run, (name, uses_rollout, options, sends) in RUNS.items():
        expected = evaluate(
            batch.tokens(FAMILY[name], rollout=uses_rollout, ref="kl" in options), FAMILY[name], **options
        )
        loss, gradient = (sum(rank[run][what] for rank in ranks) for what in ("loss", "gradient"))
        assert loss == pytest.approx(expected.loss, rel=1e-13, abs=1e-14), run
        torch.testing.assert_close(gradient, expected.flat, rtol=1e-12, atol=1e-16)
        for rank in ranks:
            assert rank[run]["metrics"] == pytest.approx(expected.reported, rel=1e-12, abs=1e-14, nan_ok=True), run
            assert rank[run]["sent"] == [("c10d::allreduce_", 8 * k * len(batch.new)) for k in sends], run
