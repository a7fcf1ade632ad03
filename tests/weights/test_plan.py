"""The plan on paper: holdings of an invented world, no processes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from megatron_gspo.weights.claims import Claim, claims_of
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.plan import ExportPlan, Holding, assign, buckets
from tests.weights.families.published import config

MOE = dict(
    model_type="qwen3_moe",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=8,
)
CLAIMS = claims_of(family_for(MOE).rules(MOE))
STACKED = MOE | dict(model_type="gpt_oss", num_local_experts=8)
TP, PP, DP, EP = 2, 2, 2, 4  # Megatron's order: tp fastest, then dp, then pp; ep spans tp and dp, etp 1


def holdings(claims: tuple[Claim, ...] = CLAIMS) -> list[Holding]:
    return [
        Holding(
            rank=(stage * DP + dp) * TP + tp,
            tp_ranks=tuple((stage * DP + dp) * TP + other for other in range(TP)),
            etp_ranks=((stage * DP + dp) * TP + tp,),
            replica=dp,
            expert_replica=0,
            dtypes={c.index: torch.bfloat16 for c in claims if held(c, stage, ep=dp * TP + tp)},
        )
        for stage, dp, tp in product(range(PP), range(DP), range(TP))
    ]


def held(claim, stage: int, ep: int) -> bool:
    if claim.layer is None:
        return (claim.hf[0].name == "model.embed_tokens.weight") == (stage == 0)
    return claim.layer // 2 == stage and (claim.expert is None or claim.expert // 2 == ep)


def plan(dtype: torch.dtype | None = None) -> ExportPlan:
    return ExportPlan(assign(CLAIMS, holdings(), dtype), binding=None)


def test_every_tensor_has_one_sender_that_holds_it():
    by_rank = {holding.rank: holding for holding in holdings()}
    names = [tensor.name for tensor in plan().tensors]
    # embed, norm, head; per layer 2 norms, q k v o, 2 QK-norms, router; per expert 3.
    assert len(names) == len(set(names)) == 3 + 4 * (9 + 8 * 3)
    for item in plan().items:
        assert item.sender in item.ranks and item.parts[0].claim.index in by_rank[item.sender].dtypes


def test_every_stage_and_every_expert_rank_sends():
    sent = Counter()
    for item in plan().items:
        sent[item.sender] += item.size_bytes
    # Rank 2 and 3 (dp 1) and 6, 7 hold a second replica of the dense weights, but experts of their own.
    assert set(sent) == set(range(8))
    assert {i.sender for i in plan().items if not i.parts[0].claim.is_expert} == {0, 1, 4, 5}
    # TP ranks of a stage share its dense bytes: they differ by less than the largest tensor.
    largest = max(item.size_bytes for item in plan().items)
    assert abs(sent[0] - sent[1]) <= largest and abs(sent[4] - sent[5]) <= largest


def test_stacked_experts_leave_whole_from_one_of_the_ranks_that_hold_them():
    claims = claims_of(family_for(STACKED).rules(STACKED))
    items = [item for item in assign(claims, holdings(claims), None) if item.parts[0].claim.is_expert]
    # Four tensors a layer, of 8 experts each, on the four EP ranks of its pipeline stage; all of them send.
    assert len(items) == 4 * 4 and all(len(item.parts) == 8 and len(item.tensors) == 1 for item in items)
    shapes = {item.tensors[0].name.split("experts.")[1]: item.tensors[0].shape for item in items}
    assert shapes == {
        "gate_up_proj": (8, 16, 64),
        "gate_up_proj_bias": (8, 64),
        "down_proj": (8, 32, 16),
        "down_proj_bias": (8, 16),
    }
    for item in items:
        stage = (item.parts[0].claim.layer or 0) // 2
        assert item.ranks == set(range(4 * stage, 4 * stage + 4)) and item.group == "tp_ep" and item.is_gathered
        assert [part.ranks for part in item.parts] == [(4 * stage + expert // 2,) for expert in range(8)]
    assert {item.sender for item in items} == set(range(8))


def test_dtype_is_the_parameters_or_the_one_asked_for():
    assert {tensor.dtype for tensor in plan().tensors} == {torch.bfloat16}
    assert {tensor.dtype for tensor in plan(torch.float32).tensors} == {torch.float32}
    (embedding,) = [t for t in plan(torch.float32).tensors if t.name == "model.embed_tokens.weight"]
    assert embedding.shape == (64, 16) and embedding.size_bytes == 64 * 16 * 4


def test_buckets_are_bounded_and_have_one_sender():
    size = 1024  # the embedding, 64 x 16 x 2 = 2048 bytes, is larger
    sequence = buckets(plan(), size)
    assert [t for b in sequence for t in b.tensors] != [] and Counter(
        t.name for b in sequence for t in b.tensors
    ) == Counter(t.name for t in plan().tensors)
    for bucket in sequence:
        assert {item.sender for item in bucket.items} == {bucket.sender}
        assert bucket.size_bytes <= size or len(bucket.items) == 1
    assert len({bucket.sender for bucket in sequence[:8]}) == 8  # senders take turns
    with pytest.raises(ValueError, match="size_bytes"):
        buckets(plan(), 0)


def test_a_tensor_that_no_rank_holds_is_named():
    without_last_stage = [h for h in holdings() if h.rank < 4]
    with pytest.raises(ValueError, match=r"no rank holds: model\.norm\.weight, lm_head\.weight.* and \d+ more"):
        assign(CLAIMS, without_last_stage, None)


def test_a_tensor_held_by_half_a_group_is_named():
    world = holdings()
    index = next(c.index for c in CLAIMS if c.hf[0].name == "model.layers.0.self_attn.q_proj.weight")
    broken = [
        Holding(**{**vars(h), "dtypes": {k: v for k, v in h.dtypes.items() if k != index}}) if h.rank == 1 else h
        for h in world
    ]
    with pytest.raises(ValueError, match=r"q_proj\.weight: ranks \[0\] .* expected exactly ranks \[0, 1\]"):
        assign(CLAIMS, broken, None)


def test_projections_to_latents_share_a_bucket():
    """SGLang fuses the two, and would forget one that comes without the other."""
    latent = config("deepseek-v3") | dict(num_hidden_layers=4, n_routed_experts=8, n_group=1, topk_group=1)
    claims = claims_of(family_for(latent).rules(latent))
    exported = ExportPlan(assign(claims, holdings(claims), torch.bfloat16), binding=None)
    pairs = [
        {t.name for t in bucket.tensors if "_a_proj" in t.name}
        for bucket in buckets(exported, size_bytes=1)
        if any("_a_proj" in t.name for t in bucket.tensors)
    ]
    attention = "model.layers.{}.self_attn.{}.weight"
    expected = [{attention.format(i, x) for x in ("q_a_proj", "kv_a_proj_with_mqa")} for i in range(4)]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, expected))
