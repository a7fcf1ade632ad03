"""Changes of routing: counted against sets of experts, by hand, and the same on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.model import Model, build_model, ddp_config, wrap
from megatron_gspo.policy.routing import RoutingWatch, pack_bits, unpack_bits
from megatron_gspo.policy.step import Stepper
from tests.policy import tiny
from tests.ranks import run_ranks

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2_etp2": (2, {"tp": 2, "etp": 2}),
    "tp2_cp2_pp2_ep2": (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 2}),
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TOKENS, SLOTS = "policy/routing_changed_tokens", "policy/routing_changed"
Change = Callable[[Model], None]


def routers(model: Model) -> Iterator[TopKRouter]:
    """Those of this rank: `layer_number` counts from 1 over all stages. The tiny model's layer 2 is dense."""
    for chunk in model.chunks:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))


def disturb(model: Model) -> None:
    """Noise on every router, enough to change some choices and not all."""
    for router in routers(model):
        generator = torch.Generator().manual_seed(router.layer_number)
        router.weight.data += 0.05 * torch.randn(router.weight.shape, generator=generator)


def negate_last(model: Model) -> None:
    """The router of the last layer, so that no other one sees other inputs for it."""
    for router in routers(model):
        if router.layer_number == 4:
            router.weight.data.neg_()


def nothing(model: Model) -> None:
    pass


def shares(change: Change, megatron: dict[str, Any], layout_sizes: dict[str, int]):
    """What a watch says of `change` between scoring and training; with it, what each router chose in both passes."""
    policy = tiny.policy(megatron, **layout_sizes)
    layout = init_layout(policy.layout)
    model = build_model(tiny.hf_config(), policy, layout)
    tiny.fill(model.chunks, layout)
    chunks = wrap(model, ddp_config(policy), layout)
    watch = RoutingWatch(chunks, layout)
    stepper = Stepper(model, chunks, layout, 1.0, watch)
    micro_batches = tiny.micro_batches(layout)
    seen: list[tuple[int, torch.Tensor]] = []
    for router in routers(model):
        router.register_forward_hook(lambda router, _, out: seen.append((router.layer_number, out[1].clone())))

    def train() -> None:
        stepper.forward_backward(micro_batches, lambda batch, number, logp, entropy: (logp.sum(), {}), 1)

    with watch.new():
        train()
    assert watch.take(dist.group.WORLD) == {}, "there was no old policy to compare with"
    seen.clear()
    with watch.old():
        stepper.score(micro_batches)
    change(model)
    stepper.score(micro_batches)  # of nobody's concern
    with watch.new():
        train()
    found = watch.take(dist.group.WORLD)
    assert watch.take(dist.group.WORLD) == {}, "nothing is left of the step before"
    return found, seen, [micro_batch.loss_mask for micro_batch in micro_batches]


def run(size: int, change: Change, megatron: dict[str, Any] | None = None, **layout: int):
    """The shares that every rank reports, which must be equal; and what rank 0 saw."""
    results = run_ranks(size, shares, change, megatron or {}, layout)
    for found, *_ in results:
        assert found == results[0][0]
    return results[0]


@cache
def one_rank():
    return run(1, disturb)


def test_shares_are_those_of_sets_of_experts():
    found, seen, masks = one_rank()
    per_pass = 3 * len(masks)  # three layers with experts; micro-batch after micro-batch, layer after layer
    old, new = seen[:per_pass], seen[2 * per_pass : 3 * per_pass]
    tokens, slots, num_slots, num_tokens = 0, 0, 0, 0
    for number, mask in enumerate(masks):
        places = mask.nonzero().flatten().tolist()
        num_tokens += len(places)
        for place in places:
            any_layer = False
            for layer in range(3):
                before, after = (
                    set(maps[3 * number + layer][1][place].nonzero().flatten().tolist()) for maps in (old, new)
                )
                slots += len(before - after)
                num_slots += len(before)
                any_layer |= before != after
            tokens += any_layer
    assert found == {TOKENS: tokens / num_tokens, SLOTS: slots / num_slots}
    assert 0.05 < found[SLOTS] < found[TOKENS] < 0.95  # or the comparison of layouts proves little


@pytest.mark.parametrize("name", LAYOUTS)
def test_shares_are_the_same_on_every_layout(name):
    size, layout = LAYOUTS[name]
    found, *_ = run(size, disturb, **layout)
    assert found == one_rank()[0]


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}])
def test_routers_that_run_again_for_recomputation_count_once(layout):
    found, *_ = run(max(layout.values(), default=1), disturb, RECOMPUTE, **layout)
    assert found == one_rank()[0]


def test_an_unchanged_policy_changes_no_expert():
    found, *_ = run(2, nothing, pp=2)
    assert found == {TOKENS: 0.0, SLOTS: 0.0}


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}])
def test_one_layer_whose_experts_all_change(layout):
    """Two of four experts are chosen, so the other two under negated logits: each choice of one of three layers."""
    found, *_ = run(max(layout.values(), default=1), negate_last, **layout)
    assert found == {TOKENS: 1.0, SLOTS: 1 / 3}


@pytest.mark.parametrize("n", [1, 7, 8, 9, 128])
def test_bits_survive_packing(n):
    flags = torch.rand(5, n, generator=torch.Generator().manual_seed(n)) > 0.5
    packed = pack_bits(flags)
    assert packed.shape == (5, -(-n // 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, n), flags)


def test_bits_stand_from_the_lowest_on():
    assert pack_bits(torch.tensor([[True, False, False, False, False, False, False, True, True]])).tolist() == [
        [129, 1]
    ]
