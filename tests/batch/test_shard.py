"""Zigzag positions, label shift, padding: hand-derived numbers, and the oracle's ownership of response tokens."""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.batch.shard import MicroBatch, shard, zigzag_positions
from megatron_gspo.batch.trajectory import Trajectories
from tests.objective.oracle import cases

YES, NO = True, False


def two_trajectories() -> Trajectories:
    """Row 4: prompt 11 12, response 13 14 15 of which 14 does not train. Row 7: prompt 16, response 17 18."""
    return Trajectories(
        rows=torch.tensor([4, 7]),
        offsets=torch.tensor([0, 5, 8]),
        tokens=torch.tensor([11, 12, 13, 14, 15, 16, 17, 18]),
        loss_mask=torch.tensor([NO, NO, YES, NO, YES, NO, YES, YES]),
        logprobs=torch.tensor([0, 0, -0.3, -0.4, -0.5, 0, -0.7, -0.8]),
        versions=torch.tensor([-1, -1, 2, 2, 2, -1, 2, 3]),
    )


def check(got: MicroBatch, **expected) -> None:
    for name, value in expected.items():
        actual = getattr(got, name)
        if isinstance(actual, torch.Tensor):
            actual = (actual[0] if actual.dim() == 2 else actual).tolist()
        assert actual == value, name


def test_zigzag_positions():
    assert zigzag_positions(6, cp=1, cp_rank=0).tolist() == [0, 1, 2, 3, 4, 5]
    assert zigzag_positions(8, cp=2, cp_rank=0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, cp=2, cp_rank=1).tolist() == [2, 3, 4, 5]
    assert zigzag_positions(8, cp=4, cp_rank=1).tolist() == [1, 6]
    assert zigzag_positions(0, cp=4, cp_rank=3).tolist() == []
    with pytest.raises(ValueError, match="10 tokens does not divide into 2 x cp = 4 chunks"):
        zigzag_positions(10, cp=2, cp_rank=0)


def test_one_rank_packs_without_gaps_and_never_predicts_across_documents():
    got = shard(two_trajectories(), [4, 7], padded_length=10, cp=1, cp_rank=0)
    check(
        got,
        tokens=[11, 12, 13, 14, 15, 16, 17, 18, 0, 0],
        position_ids=[0, 1, 2, 3, 4, 0, 1, 2, 0, 1],
        labels=[12, 13, 14, 15, 0, 17, 18, 0, 0, 0],
        loss_mask=[NO, YES, NO, YES, NO, YES, YES, NO, NO, NO],
        padding_mask=[NO] * 8 + [YES] * 2,
        cu_seqlens=[0, 5, 8, 10],
        max_seqlen=5,
        rows=[4, 7],
        offsets=[0, 5, 8],
    )
    # Row 4's labels are 12 13 14 15 (12 is prompt), row 7's are 17 18.
    assert got.rollout_logprobs.tolist() == torch.tensor([0, -0.3, -0.4, -0.5, 0, -0.7, -0.8, 0, 0, 0]).tolist()


def test_two_ranks_own_zigzag_chunks_of_each_document():
    """Row 7 is padded from 3 to 4 tokens (chunks of 1), row 4 from 5 to 8 (chunks of 2), the tail has 4 (chunks of 1).

    Packed:    16 17 18 .  | 11 12 13 14 15 .  .  .  | .  .  .  .
    cp rank:    0  1  1 0  |  0  0  1  1  1 1  0  0  | 0  1  1  0
    """
    both = dict(cu_seqlens=[0, 4, 12, 16], max_seqlen=8, rows=[7, 4], offsets=[0, 2, 6])
    first, second = (shard(two_trajectories(), [7, 4], padded_length=16, cp=2, cp_rank=r) for r in (0, 1))
    check(
        first,
        tokens=[16, 0, 11, 12, 0, 0, 0, 0],
        position_ids=[0, 3, 0, 1, 6, 7, 0, 3],
        labels=[17, 0, 12, 13, 0, 0, 0, 0],
        loss_mask=[YES, NO, NO, YES, NO, NO, NO, NO],
        padding_mask=[NO, YES, NO, NO, YES, YES, YES, YES],
        **both,
    )
    check(
        second,
        tokens=[17, 18, 13, 14, 15, 0, 0, 0],
        position_ids=[1, 2, 2, 3, 4, 5, 1, 2],
        labels=[18, 0, 14, 15, 0, 0, 0, 0],
        loss_mask=[YES, NO, NO, YES, NO, NO, NO, NO],
        padding_mask=[NO, NO, NO, NO, NO, YES, YES, YES],
        **both,
    )


def test_a_micro_batch_without_rows_is_all_padding():
    got = shard(two_trajectories(), [], padded_length=8, cp=2, cp_rank=1)
    nothing = dict(tokens=[0] * 4, labels=[0] * 4, loss_mask=[NO] * 4, padding_mask=[YES] * 4)
    check(got, position_ids=[2, 3, 4, 5], cu_seqlens=[0, 8], max_seqlen=8, rows=[], offsets=[0], **nothing)


def test_a_full_micro_batch_has_no_tail():
    check(shard(two_trajectories(), [4, 7], padded_length=8, cp=1, cp_rank=0), cu_seqlens=[0, 5, 8], max_seqlen=5)


def test_refusals_name_the_numbers():
    with pytest.raises(ValueError, match=r"rows \[4, 7\] need 12 tokens with each padded to a multiple of 4.*8"):
        shard(two_trajectories(), [4, 7], padded_length=8, cp=2, cp_rank=0)
    with pytest.raises(ValueError, match="padded_length 14 must be a multiple of 4 at cp 2"):
        shard(two_trajectories(), [4], padded_length=14, cp=2, cp_rank=0)
    with pytest.raises(ValueError, match=r"rows \[5\] are not among the trajectories held here"):
        shard(two_trajectories(), [4, 5], padded_length=8, cp=1, cp_rank=0)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("case", ["c00_basic", "c19_holes"])
def test_ranks_own_the_response_tokens_that_the_oracle_says(case: str, cp: int):
    """It lists which response tokens each rank's positions predict. Token id here: response index + 1."""
    masks = cases()[case].mask
    for check, mask in zip(cases()[case].cp_checks[cp], masks, strict=True):
        prompt, n = check["prompt_len"], check["total_len"] - check["prompt_len"]
        trajectory = Trajectories(
            rows=torch.tensor([0]),
            offsets=torch.tensor([0, prompt + n]),
            tokens=torch.cat([torch.zeros(prompt, dtype=torch.int64), torch.arange(1, n + 1)]),
            loss_mask=torch.cat([torch.zeros(prompt, dtype=torch.bool), mask[:n]]),
            logprobs=torch.zeros(prompt + n),
            versions=torch.zeros(prompt + n, dtype=torch.int64),
        )
        for rank in range(cp):
            got = shard(trajectory, [0], padded_length=2 * cp * check["chunk"], cp=cp, cp_rank=rank)
            owned = got.labels[got.labels > 0] - 1
            assert owned.tolist() == check["owned_response_idx"][rank]
            assert int(got.loss_mask.sum()) == check["local_mask_sum"][rank]
