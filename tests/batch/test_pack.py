"""The packing plan: what holds for every plan, small plans derived by hand, and the balance it is there for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_gspo.batch.pack import MiniBatch, plan_batch


def plan(lens, *, group=None, **changed):
    group = list(range(len(lens))) if group is None else group
    defaults = dict(mini_batches=1, dp=1, max_tokens=64, cp=1, length_multiple=1, attention_cost=0.0)
    return plan_batch(lens, group, **{**defaults, **changed})


def lognormal(n: int, median: float, sigma: float, longest: int = 32768) -> list[int]:
    return np.clip(np.random.default_rng(0).lognormal(np.log(median), sigma, n), 64, longest).astype(int).tolist()


def check(part: MiniBatch, lens, *, dp: int, max_tokens: int, cp: int, length_multiple: int, multiple: int) -> None:
    """Every row once, ranks alike, everything within bounds and no longer than the fullest micro-batch needs."""
    micro_batches = [rows for rank in part.micro_batches for rows in rank]
    assert sorted(row for rows in micro_batches for row in rows) == list(part.rows)
    assert len(part.micro_batches) == dp
    counts = {len(rank) for rank in part.micro_batches}
    assert len(counts) == 1 and counts.pop() % multiple == 0
    document = 2 * cp if cp > 1 else 1
    fullest = max(sum(-(-lens[row] // document) * document for row in rows) for rows in micro_batches)
    assert fullest <= part.padded_length < fullest + length_multiple
    assert part.padded_length <= max_tokens
    assert part.padded_length % length_multiple == 0


@pytest.mark.parametrize("attention_cost", [0.0, 6e-5])
@pytest.mark.parametrize(
    ("n", "dp", "cp", "length_multiple", "multiple", "max_tokens"),
    [(60, 1, 1, 1, 1, 40000), (60, 8, 4, 64, 2, 33000), (3, 4, 2, 16, 1, 32768), (240, 3, 2, 4, 4, 65536)],
)
def test_every_plan(n, dp, cp, length_multiple, multiple, max_tokens, attention_cost):
    lens = lognormal(n, 2000, 1.0, 32000)
    got = plan(
        lens,
        group=[row // (n // 12) for row in range(n)] if n >= 12 else list(range(n)),
        mini_batches=3,
        dp=dp,
        cp=cp,
        max_tokens=max_tokens,
        length_multiple=length_multiple,
        micro_batch_multiple=multiple,
        attention_cost=attention_cost,
    )
    assert sorted(row for part in got.mini_batches for row in part.rows) == list(range(n))
    for part in got.mini_batches:
        check(part, lens, dp=dp, cp=cp, max_tokens=max_tokens, length_multiple=length_multiple, multiple=multiple)


def test_mini_batches_take_whole_prompts_in_order_of_appearance():
    """Prompts 9, 2, 5 and 7 appear in this order; two mini-batches get 9 and 2, then 5 and 7."""
    got = plan([4] * 8, group=[9, 2, 9, 5, 2, 7, 5, 9], mini_batches=2)
    assert [part.rows for part in got.mini_batches] == [(0, 1, 2, 4, 7), (3, 5, 6)]


def test_two_ranks_by_hand():
    """Tokens 7 6 5 4 3 2 1 on two ranks of at most 14: longest first to the emptier bin gives 7+4+3 and 6+5+2+1."""
    got = plan([1, 2, 3, 4, 5, 6, 7], dp=2, max_tokens=14).mini_batches[0]
    assert got.padded_length == 14
    assert got.micro_batches == (((2, 3, 6),), ((0, 1, 4, 5),))


def test_as_few_micro_batches_as_fit():
    """9 8 7 6 fill two bins of 15 (9+6, 8+7); with a 10 in place of the 9 there are 31 tokens, and three bins."""
    assert len(plan([9, 8, 7, 6], max_tokens=15).mini_batches[0].micro_batches[0]) == 2
    assert len(plan([10, 8, 7, 6], max_tokens=15).mini_batches[0].micro_batches[0]) == 3


def test_a_batch_too_tight_to_balance_is_packed_by_best_fit():
    """In bins of 12, balancing places 6 | 6, 4 | 4 and has no room for the last 4; best fit places 6+6 and 4+4+4."""
    got = plan([6, 6, 4, 4, 4], max_tokens=12).mini_batches[0]
    assert got.padded_length == 12
    assert sorted(got.micro_batches[0]) == [(0, 1), (2, 3, 4)]


def test_fewer_sequences_than_micro_batches_leave_some_empty():
    got = plan([5, 3], dp=2, micro_batch_multiple=2).mini_batches[0]
    assert got.micro_batches == (((0,), ()), ((1,), ()))


def test_documents_count_with_their_context_parallel_padding():
    """At cp 2, 5 and 3 tokens take 8 and 4: 12 together, 16 in multiples of 16."""
    assert plan([5, 3], cp=2, length_multiple=16).mini_batches[0].padded_length == 16


def test_similar_micro_batches_run_together():
    """Two sequences of 100 and six of 10, three bins a rank of two: the long ones meet in the first micro-batch."""
    got = plan([10, 100, 10, 10, 100, 10, 10, 10], dp=2, max_tokens=100, attention_cost=1e-3).mini_batches[0]
    assert [rank[0] for rank in got.micro_batches] == [(1,), (4,)]


def test_plans_are_the_same_whatever_holds_the_lengths():
    lens = lognormal(200, 2000, 1.0)
    options = dict(dp=4, max_tokens=65536, length_multiple=8, attention_cost=6e-5)
    first = plan(lens, **options)
    assert plan(torch.tensor(lens), group=torch.arange(200), **options) == first
    assert plan(np.array(lens), **options) == first


def test_refusals_name_key_row_and_length():
    with pytest.raises(ValueError, match=r"batch.max_tokens is 64.*row 1 has 70 \(72 padded\)"):
        plan([5, 70], cp=2, length_multiple=4)
    with pytest.raises(ValueError, match=r"batch.max_tokens is 63, room for 60 tokens in multiples of 4"):
        plan([61], length_multiple=4, max_tokens=63)
    with pytest.raises(ValueError, match=r"batch.mini_batches is 2, which does not divide the 3 prompts"):
        plan([1, 1, 1], mini_batches=2)
    with pytest.raises(ValueError, match="length_multiple 6 must be a multiple of 2 x cp = 4"):
        plan([1], cp=2, length_multiple=6)


@pytest.mark.parametrize(("median", "sigma"), [(1000, 1.5), (2000, 1.0), (4000, 0.8), (8000, 0.5)])
def test_long_tails_are_balanced_in_tokens_and_flops(median: float, sigma: float):
    """4096 sequences up to 32k tokens, 8 ranks: padding under 1 %, FLOPs within 2 % over ranks and in lockstep."""
    lens = np.array(lognormal(4096, median, sigma), dtype=float)
    got = plan(lens.astype(int).tolist(), dp=8, max_tokens=65536, length_multiple=64, attention_cost=6e-5)
    (part,) = got.mini_batches
    tokens = np.array([[lens[list(rows)].sum() for rows in rank] for rank in part.micro_batches])
    cost = np.array([[(lens + 6e-5 * lens**2)[list(rows)].sum() for rows in rank] for rank in part.micro_batches])
    assert 1 - tokens.sum() / (tokens.size * part.padded_length) < 0.01
    assert cost.sum(axis=1).max() / cost.sum(axis=1).mean() - 1 < 0.02
    assert cost.max(axis=0).sum() / cost.sum(axis=1).mean() - 1 < 0.02
