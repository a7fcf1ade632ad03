"""Bucketed THD attention against a dense masked softmax, at every context-parallel size."""

import pytest
import torch

from megatron_gspo.batch.shard import zigzag_positions
from megatron_gspo.policy.local_attention import attend
from megatron_gspo.policy.packed import attention_buckets, packed_positions

HEADS, GROUPS, DIM = 4, 2, 8
LENS = (24, 8, 40, 8, 16, 0, 32)
BOUNDS = (0, 24, 32, 72, 80, 96, 96, 128)


def _dense(query, key, value, window=None, sinks=None):
    """[T, heads, d] causal inside each document, one [T, T] mask, in float64. Sinks [heads] as their definition says:
    exp(sink) more in the denominator."""
    document = torch.repeat_interleave(torch.arange(len(LENS)), torch.tensor(LENS))
    visible = (document[:, None] == document) & torch.ones(128, 128).tril().bool()
    if window is not None:
        visible &= ~torch.ones(128, 128).tril(-window - 1).bool()
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.5
    terms = scores.exp() * visible
    extra = 0 if sinks is None else sinks.exp()[:, None, None]
    weights = terms / (terms.sum(-1, keepdim=True) + extra)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _local_rows(cp, cp_rank):
    """Global rows that a rank holds, document by document."""
    starts = zip(LENS, BOUNDS, strict=False)
    return torch.cat([start + zigzag_positions(length, cp, cp_rank) for length, start in starts])


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 0, 5, 100])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_equals_dense_attention(cp, window, with_sinks):
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(128, heads, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    query, key, value = inputs
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0], dtype=torch.float64, requires_grad=True) if with_sinks else None
    inputs += [sinks] if with_sinks else []
    upstream = torch.randn(128, HEADS, DIM, generator=generator, dtype=torch.float64)
    expected = _dense(query, key, value, window, sinks)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), inputs)

    gathered = torch.cat([_local_rows(cp, rank) for rank in range(cp)])  # the order of an all-gather over CP
    found = torch.empty_like(expected)
    grads = [torch.zeros_like(x) for x in inputs]
    for rank in range(cp):
        rows = _local_rows(cp, rank)
        buckets = attention_buckets(BOUNDS, cp, rank, window)
        out = attend(query[rows], key[gathered], value[gathered], buckets, 0.5, sinks)
        found[rows] = out.detach()
        for total, part in zip(grads, torch.autograd.grad((out * upstream[rows]).sum(), inputs), strict=True):
            total += part
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(tuple(grads), expected_grads)


def test_similar_lengths_share_one_rectangle():
    # 13 and 16 tokens are padded to 16; 17 is alone; the empty document has no cell.
    buckets = attention_buckets((0, 13, 29, 46, 46), 1, 0)
    assert buckets.shapes == ((2, 16, 16), (1, 17, 17))
    assert buckets.unpad[[0, 12, 13, 28, 29, 45]].tolist() == [0, 12, 16, 31, 32, 48]


def test_packed_positions_are_zigzag_per_document():
    # cp 2 cuts 8 tokens into chunks 0-1, 2-3, 4-5, 6-7: rank 1 owns the middle two.
    assert packed_positions((0, 8, 12), 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert packed_positions((0, 8, 12), 2, 1).tolist() == [2, 3, 4, 5, 1, 2]
