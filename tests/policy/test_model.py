"""Forward and gradient of a tiny Qwen3-MoE on every layout equal those of one rank."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatron_gspo.config.schema import Dtype, PolicyConfig
from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.model import build_model, ddp_config, stage_padding_mask, sync_parameters, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper
from tests.policy import tiny
from tests.ranks import run_ranks

# A z-loss puts the routers' own gradients, and what padding does to them, under test as well.
MEGATRON = {"moe_z_loss_coeff": 0.1}

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "pp2": (2, {"pp": 2}),
    "pp2_uneven": (2, {"pp": 2, "pipeline_layout": "Et|tttL"}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2_etp2": (2, {"tp": 2, "etp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}),
    "cp2_ep2_dp2": (4, {"cp": 2, "ep": 2}),
    "tp2_pp2_cp2_ep2_etp2": (8, {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 2}),
}


def _step(policy: PolicyConfig, hf: dict[str, Any]):
    """(sum over this rank's tokens of logp x position-dependent weights, gradients as `local_tensors`)."""
    layout = init_layout(policy.layout)
    model = build_model(hf, policy, layout)
    tiny.fill(model.chunks, layout)
    chunks = wrap(model, ddp_config(policy), layout)
    stepper = Stepper(model, chunks, layout, temperature=0.8)

    def loss(micro_batch, number, logp, entropy):
        weight = (1.0 + 0.1 * micro_batch.position_ids[0]) * micro_batch.loss_mask
        value = (logp * weight).sum() / sum(tiny.LENS)
        return value, {"loss": float(value.detach())}

    metrics = stepper.forward_backward(tiny.micro_batches(layout), loss, num_tokens=sum(tiny.LENS))
    value = sum(metric["loss"] for metric in metrics) if layout.tp_rank == 0 else 0.0
    tiny.gradients_as_parameters(model.chunks)
    return value, tiny.local_tensors(model.chunks, layout)


def _run(size: int, tied: bool = False, megatron: Any = None, ddp: Any = None, **layout: Any):
    policy = replace(tiny.policy(MEGATRON | (megatron or {}), **layout), ddp=ddp or {})
    results = run_ranks(size, _step, policy, tiny.hf_config(tie_word_embeddings=tied))
    return sum(value for value, _ in results), tiny.global_tensors([tensors for _, tensors in results])


@cache
def _one_rank(tied: bool):
    return _run(1, tied)


def _assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, f"{name} has no gradient: the comparison would prove nothing"
        rows = min(len(found[1][name]), len(gradient))  # other layouts pad the vocabulary otherwise
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            found[1][name][:rows], gradient[:rows], rtol=0, atol=2e-5 * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_changes_neither_loss_nor_gradients(name):
    size, layout = LAYOUTS[name]
    _assert_same(_run(size, **layout), _one_rank(False))


AUXILIARY = {"moe_aux_loss_coeff": 0.05, "moe_router_load_balancing_type": "aux_loss"}


@pytest.mark.parametrize("name", ["tp2", "pp2", "cp2", "ep2", "tp2_etp2"])
def test_auxiliary_loss_has_the_same_gradients_at_a_fixed_cut(name):
    """Its statistics are those of a micro-batch, whose tokens TP and CP ranks share; the policy's own loss stays."""
    size, layout = LAYOUTS[name]
    expected = _run(1, megatron=AUXILIARY)
    _assert_same(_run(size, megatron=AUXILIARY, **layout), expected)
    assert expected[0] == _one_rank(False)[0]
    assert any(not torch.equal(gradient, expected[1][key]) for key, gradient in _one_rank(False)[1].items())


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_tied_embeddings(layout):
    _assert_same(_run(2, tied=True, **layout), _one_rank(True))


RECOMPUTATION = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
}


@pytest.mark.parametrize("name", RECOMPUTATION)
def test_recomputation_changes_nothing(name):
    _assert_same(_run(1, megatron=RECOMPUTATION[name]), _one_rank(False))


def test_overlapped_gradient_reduction_changes_nothing():
    _assert_same(_run(4, ddp={"overlap_grad_reduce": True}, pp=2, vpp=2), _one_rank(False))


def _parameters_after_a_step(overlap: bool):
    recipe = tiny.recipe(distributed=True)
    options = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    recipe = replace(recipe, policy=replace(recipe.policy, ddp=options))
    layout = init_layout(recipe.policy.layout)
    model = build_model(tiny.hf_config(), recipe.policy, layout)
    tiny.fill(model.chunks, layout)
    chunks = wrap(model, ddp_config(recipe.policy), layout)
    optimizer, _ = build_optimizer(recipe, chunks, layout)
    stepper = Stepper(model, chunks, layout, temperature=1.0)
    stepper.forward_backward(tiny.micro_batches(layout), lambda batch, number, logp, _: (-logp.mean(), {}), 1)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.chunks[0].parameters()]
    sync_parameters(chunks)
    return before, [parameter.detach().clone() for parameter in model.chunks[0].parameters()]


def test_parameters_are_stale_under_overlap_until_synchronised():
    (_, expected), _ = run_ranks(2, _parameters_after_a_step, False)
    for before, after in run_ranks(2, _parameters_after_a_step, True):
        assert not all(map(torch.equal, before, expected))
        assert all(map(torch.equal, after, expected))


def _parallel_sizes(policy: PolicyConfig):
    layout = init_layout(policy.layout)
    names = ("dp", "tp", "pp", "cp", "ep", "etp", "dp_rank", "tp_rank", "pp_rank", "cp_rank", "ep_rank", "etp_rank")
    place = {name: getattr(layout, name) for name in names}
    return place | {"first": layout.is_first_stage, "last": layout.is_last_stage, "to": layout.last_stage_rank}


def test_layout_numbers():
    # tp 2 is the fastest dimension, then cp, then dp; pp is the slowest: rank 5 is tp 1, cp 0 of the second stage.
    places = run_ranks(8, _parallel_sizes, tiny.policy(tp=2, pp=2, cp=2, ep=2))
    place = places[5]
    assert [place[name] for name in ("dp", "tp", "pp", "cp", "ep", "etp")] == [1, 2, 2, 2, 2, 1]
    assert [place[name] for name in ("dp_rank", "tp_rank", "pp_rank", "cp_rank")] == [0, 1, 1, 0]
    assert (place["first"], place["last"], place["to"]) == (False, True, 5)
    assert (places[1]["first"], places[1]["last"], places[1]["to"]) == (True, False, 5)
    # Expert tensor parallelism is 1 although tp is 2: Megatron's own default would be 2.
    assert {p["etp_rank"] for p in places} == {0} and [p["ep_rank"] for p in places[:4]] == [0, 1, 0, 1]


def test_a_layout_that_does_not_divide_the_world_is_refused():
    with pytest.raises(AssertionError, match=r"tp 2 x pp 2 x cp 1 = 4 does not divide the 2 trainer ranks"):
        run_ranks(2, _parallel_sizes, tiny.policy(tp=2, pp=2))


def _mask_by_stage(policy: PolicyConfig):
    layout = init_layout(policy.layout)
    chunks = build_model(tiny.hf_config(), policy, layout).chunks
    mask = torch.tensor([[False, False, False, True]])
    return [stage_padding_mask(chunk, mask, layout)[0].tolist() for chunk in chunks]


def test_padding_mask_is_cut_beyond_the_embedding():
    # GPTModel cuts the mask over sequence parallelism where it embeds, and nowhere else.
    first, second, third, fourth = run_ranks(4, _mask_by_stage, tiny.policy(tp=2, pp=2, vpp=2))
    assert first == [[False, False, False, True], [False, False]]
    assert second == [[False, False, False, True], [False, True]]
    assert third == [[False, False]] * 2
    assert fourth == [[False, True]] * 2


def _bf16_dtypes():
    policy = tiny.policy(dtype=Dtype.bf16)
    layout = init_layout(policy.layout)
    model = build_model(tiny.hf_config(), policy, layout)
    chunks = wrap(model, ddp_config(policy), layout)
    (logp, entropy), *_ = Stepper(model, chunks, layout, 1.0).score(tiny.micro_batches(layout))
    parameters = list(model.chunks[0].parameters())
    return logp.dtype, entropy.dtype, {p.dtype for p in parameters}, {p.main_grad.dtype for p in parameters}


def test_bf16_keeps_logprobs_and_gradients_in_fp32():
    assert run_ranks(1, _bf16_dtypes) == [(torch.float32, torch.float32, {torch.bfloat16}, {torch.float32})]


def _routers_frozen():
    policy = tiny.policy()
    model = build_model(tiny.hf_config(), policy, init_layout(policy.layout))
    return [module.frozen_expert_bias for module in model.chunks[0].modules() if hasattr(module, "frozen_expert_bias")]


def test_expert_bias_is_frozen_in_every_router():
    assert run_ranks(1, _routers_frozen) == [[True, True, True]]
