"""The learning-rate schedule in numbers, and which parameters decay."""

from dataclasses import replace

import pytest

from megatron_gspo.config.schema import Schedule
from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.model import build_model, ddp_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer, optimizer_config
from tests.policy import tiny
from tests.ranks import run_ranks


def _rates(steps: int, changes: dict):
    recipe = tiny.recipe(distributed=False)
    section = replace(recipe.policy.optimizer, lr=1.0, weight_decay=0.5, **changes)
    recipe = replace(recipe, policy=replace(recipe.policy, optimizer=section))
    layout = init_layout(recipe.policy.layout)
    model = build_model(tiny.hf_config(), recipe.policy, layout)
    optimizer, scheduler = build_optimizer(recipe, wrap(model, ddp_config(recipe.policy), layout), layout)
    names = {id(parameter): name for name, parameter in model.chunks[0].named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return [round(rate, 6) for rate in rates], decay


def test_constant_after_warmup():
    # The step at which the warm-up begins has rate 0, as Megatron counts it.
    [(rates, _)] = run_ranks(1, _rates, 6, {"schedule": Schedule.constant, "warmup_steps": 4})
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decays_over_the_run_by_default():
    # The recipe has 10 steps of one mini-batch.
    [(rates, _)] = run_ranks(1, _rates, 12, {"schedule": Schedule.linear, "warmup_steps": 0})
    assert rates == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]


def test_cosine_to_min_lr():
    changes = {"schedule": Schedule.cosine, "warmup_steps": 2, "decay_steps": 6, "min_lr": 0.2}
    [(rates, _)] = run_ranks(1, _rates, 7, changes)
    # Half a cosine from 1 to 0.2 over 4 steps: 0.2 + 0.8 (1 + cos(k pi / 4)) / 2
    assert rates == [0.0, 0.5, 1.0, pytest.approx(0.882843), 0.6, pytest.approx(0.317157), 0.2]


def test_norms_do_not_decay():
    [(_, decay)] = run_ranks(1, _rates, 0, {})
    assert len(decay) == 4 * 6 + 3 * (1 + 4 * 2) + 2 + 3  # attention; routers and experts; the dense MLP; the ends
    for name, value in decay.items():
        assert value == (0.0 if "norm" in name else 0.5), name


def test_a_warmup_that_leaves_no_step_is_refused():
    with pytest.raises(AssertionError, match="warmup_steps 10 leaves no step of decay_steps 10"):
        run_ranks(1, _rates, 0, {"schedule": Schedule.linear, "warmup_steps": 10})


def test_derived_optimizer_fields_are_refused():
    policy = tiny.policy()
    policy = replace(policy, optimizer=replace(policy.optimizer, megatron={"adam_beta1": 0.5}))
    with pytest.raises(ValueError, match=r"policy\.optimizer\.megatron\.adam_beta1: .*policy\.optimizer\.beta1"):
        optimizer_config(policy)
    with pytest.raises(ValueError, match=r"policy\.ddp\.average_in_collective: .*summed"):
        ddp_config(replace(tiny.policy(), ddp={"average_in_collective": True}))
