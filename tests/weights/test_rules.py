"""Cuts written out by hand, and the law behind them: the shards' pieces cover every HF element exactly once."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron_gspo.weights.claims import claims_of
from megatron_gspo.weights.rules import QKV, Copy, GateUp, HFTensor, Piece, Rule, Stacked, Vocab


def shards(rule: Rule, size: int, hf: list[torch.Tensor], local: tuple[int, ...] | None = None) -> list[torch.Tensor]:
    """Every shard as `pieces` fill it; -1 where they do not."""
    filled = []
    for rank in range(size):
        shard = torch.full(local or rule.local_shape(size), -1)
        for piece in rule.pieces(rank, size, tuple(shard.shape)):
            shard[piece.put] = hf[piece.source][piece.take]
        filled.append(shard)
    return filled


def test_qkv_interleaves_by_key_value_head():
    # 4 query heads, 2 key/value heads of dimension 2: group 0 is q0 q1 k0 v0, group 1 is q2 q3 k1 v1.
    rule = QKV(hf=(HFTensor("q", (8,)), HFTensor("k", (4,)), HFTensor("v", (4,))), megatron=("qkv",), kv_heads=2)
    q, k, v = torch.arange(8), torch.arange(10, 14), torch.arange(20, 24)
    first, second = [0, 1, 2, 3, 10, 11, 20, 21], [4, 5, 6, 7, 12, 13, 22, 23]
    assert shards(rule, 1, [q, k, v])[0].tolist() == first + second
    assert [s.tolist() for s in shards(rule, 2, [q, k, v])] == [first, second]
    # More ranks than key/value heads: a group is cut in the middle, as Megatron's column-parallel linear cuts it.
    assert [s.tolist() for s in shards(rule, 4, [q, k, v])] == [first[:4], first[4:], second[:4], second[4:]]


def test_gate_up_cuts_gate_and_up_apart():
    rule = GateUp(hf=(HFTensor("gate", (4,)), HFTensor("up", (4,))), megatron=("fc1",))
    gate, up = torch.arange(4), torch.arange(10, 14)
    assert [s.tolist() for s in shards(rule, 2, [gate, up])] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_vocabulary_padding_is_nobodys():
    # 5 rows padded to 8 over 4 ranks: the third rank has one real row, the last none.
    rule = Vocab(hf=(HFTensor("embed", (5,)),), megatron=("embedding",))
    assert [s.tolist() for s in shards(rule, 4, [torch.arange(5)], (2,))] == [[0, 1], [2, 3], [4, -1], [-1, -1]]


def test_copy_cuts_columns():
    rule = Copy(hf=(HFTensor("o", (2, 4)),), megatron=("proj",), dim=1)
    assert [s.tolist() for s in shards(rule, 2, [torch.arange(8).view(2, 4)])] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


RULES = {
    "copy rows": Copy(hf=(HFTensor("a", (8, 3)),), megatron=("m",), dim=0),
    "copy columns": Copy(hf=(HFTensor("a", (3, 8)),), megatron=("m",), dim=1),
    "vocab": Vocab(hf=(HFTensor("a", (7, 3)),), megatron=("m",)),
    "gate up": GateUp(hf=(HFTensor("a", (8, 3)), HFTensor("b", (8, 3))), megatron=("m",)),
    "qkv": QKV(hf=(HFTensor("q", (16, 3)), HFTensor("k", (8, 3)), HFTensor("v", (8, 3))), megatron=("m",), kv_heads=4),
}


@pytest.mark.parametrize("name,size", list(product(RULES, (1, 2, 4, 8))))
def test_pieces_cover_every_element_once(name: str, size: int):
    rule = RULES[name]
    counts = [torch.zeros(tensor.shape, dtype=torch.int) for tensor in rule.hf]
    local = rule.local_shape(size)
    for rank in range(size):
        taken = torch.zeros(local, dtype=torch.int)
        for piece in rule.pieces(rank, size, local):
            counts[piece.source][piece.take] += 1
            taken[piece.put] += 1
            assert counts[piece.source][piece.take].shape == taken[piece.put].shape
        assert taken.max() <= 1
    assert all((count == 1).all() for count in counts)


def test_a_stacked_tensor_is_claimed_once_and_whole():
    def half(name: str, row: int) -> Rule:
        stacked = Stacked("gate_up", (2, 6), row, step=2, only=True)
        return Copy(hf=(HFTensor(f"{{expert}}.{name}", (3,), stacked),), megatron=("m",), experts=2)

    assert len(claims_of([half("gate", 0), half("up", 1)])) == 4
    with pytest.raises(ValueError, match="do not cover exactly: gate_up"):
        claims_of([half("gate", 0)])
    with pytest.raises(ValueError, match=r"more than one rule claims: gate_up\[0, 0::2\], gate_up\[1, 0::2\]"):
        claims_of([half("gate", 0), half("up", 0)])


def test_a_replicated_tensor_is_whole_everywhere():
    rule = Copy(hf=(HFTensor("norm", (4,)),), megatron=("m",))
    assert not rule.is_cut
    assert [list(rule.pieces(rank, 2, (4,))) for rank in range(2)] == [[Piece(0, (), ())]] * 2


def test_impossible_cuts_name_the_parameter():
    with pytest.raises(ValueError, match="fc1: 6 cannot be cut into 4"):
        GateUp(hf=(HFTensor("gate", (6,)), HFTensor("up", (6,))), megatron=("fc1",)).local_shape(4)
    with pytest.raises(ValueError, match=r"qkv: 4 key/value heads .* size 6"):
        QKV(
            hf=(HFTensor("q", (48,)), HFTensor("k", (12,)), HFTensor("v", (12,))), megatron=("qkv",), kv_heads=4
        ).local_shape(6)
