"""The product's first promise: a step gives the same loss, gradient norm, metrics and weights on every layout and cut.

Tolerances: everything runs in fp32 with log-ratio sums in fp64. Sums over ranks and micro-batches are taken in another
order than on one rank, which moves a gradient by some fp32 ulps. AdamW's first steps are the gradient's sign unless eps
is of the gradient's size, so eps is 1e-2 here: a step is then smooth in the gradient. Losses are compared to 2e-5 and
norms to 1e-5 (relative), weights after two steps of lr 1e-2 to 2e-6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron_gspo.batch.trajectory import Trajectories
from megatron_gspo.config import (
    BatchConfig,
    Dtype,
    GspoConfig,
    LayoutConfig,
    OptimizerSection,
    PolicyConfig,
    Recipe,
    RunConfig,
    SftConfig,
)
from megatron_gspo.loop.cut import cut_batch, gather_logp, make_plan, spread_logp
from megatron_gspo.loop.given import assemble
from megatron_gspo.loop.loss import MiniBatchTerms, make_loss
from megatron_gspo.loop.source import GivenBatch
from megatron_gspo.objective import merge, reduce_metrics
from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.model import build_model, ddp_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper, apply_gradients
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import buckets, gather, plan_export
from megatron_gspo.weights.load import load_hf
from tests.loop.tiny import tiny_checkpoint
from tests.ranks import run_ranks

PROMPTS, SAMPLES = 6, 4
LR = 1e-2


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    old_logp: torch.Tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hf"))


def make_batch(seed: int = 5) -> GivenBatch:
    """Ragged trajectories with holes in their loss masks; one trains on nothing. The first is the longest."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> torch.Tensor:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, 96, (length,), generator=generator)

    n = PROMPTS * SAMPLES
    index, trajectories = assemble([tokens(2, 9) for _ in range(n)], [tokens(1, 40) for _ in range(n)])
    mask = trajectories.loss_mask & (torch.rand(len(trajectories.tokens), generator=generator) > 0.2)
    mask[int(trajectories.offsets[3]) : int(trajectories.offsets[4])] = False
    spans = zip(trajectories.offsets[:-1].tolist(), trajectories.offsets[1:].tolist(), strict=True)
    trained = torch.tensor([int(mask[start:end].sum()) for start, end in spans])
    index = replace(
        index,
        trained_lens=trained,
        group=torch.arange(n) // SAMPLES,
        rewards=torch.rand(n, generator=generator, dtype=torch.float64),
    )
    return GivenBatch(index, replace(trajectories, loss_mask=mask))


def recipe_for(checkpoint: Path, layout: LayoutConfig, objective, max_tokens: int, distributed: bool) -> Recipe:
    return Recipe(
        run=RunConfig(dir="unused", steps=1),
        policy=PolicyConfig(
            hf=str(checkpoint),
            dtype=Dtype.fp32,
            layout=layout,
            optimizer=OptimizerSection(lr=LR, eps=1e-2, clip_grad=1.0, weight_decay=0.01, distributed=distributed),
        ),
        objective=objective,
        batch=BatchConfig(prompts=PROMPTS, samples=SAMPLES, mini_batches=2, max_tokens=max_tokens),
    )


def one_step(recipe: Recipe) -> Outcome:
    """Score, then one update per mini-batch, then export: what the loop does, on this rank."""
    import json

    layout = init_layout(recipe.policy.layout)
    hf_config = json.loads((Path(recipe.policy.hf) / "config.json").read_text())
    model = build_model(hf_config, recipe.policy, layout)
    binding = bind(model.chunks, hf_config, layout.pgs)
    load_hf(recipe.policy.hf, binding)
    chunks = wrap(model, ddp_config(recipe.policy), layout)
    optimizer, scheduler = build_optimizer(recipe, chunks, layout)
    stepper = Stepper(model, chunks, layout, temperature=0.8)

    batch = make_batch()
    cuts = cut_batch(batch, make_plan(batch.index, recipe.batch, layout, hf_config), layout, torch.device("cpu"))
    old = [[logp for logp, _ in stepper.score(cut.micro_batches)] for cut in cuts]
    flat = gather_logp(cuts, old, batch.index, layout)
    again = spread_logp(flat, batch, cuts, layout)
    advantages = torch.linspace(-1.5, 1.0, PROMPTS * SAMPLES, dtype=torch.float64)
    metrics, norms = [], []
    for number, cut in enumerate(cuts):
        rows = list(cut.plan.rows)
        terms = MiniBatchTerms(
            advantages=advantages,
            trained_lens=batch.index.trained_lens,
            old_logp=again[number],
            num_sequences=len(rows),
            num_trained_tokens=int(batch.index.trained_lens[rows].sum()),
            cp_group=layout.pgs.cp,
        )
        parts = stepper.forward_backward(cut.micro_batches, make_loss(recipe.objective, terms), cut.num_tokens)
        reduced = (
            reduce_metrics(merge(parts), dp_cp_group=layout.pgs.dp_cp, dp_group=layout.pgs.dp, device="cpu")
            if layout.is_last_stage
            else {}
        )
        metrics.append(reduced)
        norms.append(apply_gradients(optimizer, scheduler, skip_non_finite=False)[0])
    weights = {}
    for bucket in buckets(plan_export(binding), 1 << 20):
        weights |= {name: tensor.clone() for name, tensor in gather(bucket)}
    return Outcome(metrics, norms, weights, flat)


def outcomes(size: int, recipe: Recipe) -> Outcome:
    """The outcome of `size` ranks: metrics of a last stage, all weights, which every sender has a share of."""
    results = run_ranks(size, one_step, recipe)
    weights: dict[str, torch.Tensor] = {}
    for result in results:
        assert not weights.keys() & result.weights.keys()
        weights |= result.weights
        assert result.grad_norms == results[0].grad_norms
        torch.testing.assert_close(result.old_logp, results[0].old_logp, rtol=0, atol=0)
    last = next(result for result in reversed(results) if result.metrics[0])
    return replace(last, weights=weights)


LAYOUTS = {
    "dp2": (2, LayoutConfig()),
    "tp2": (2, LayoutConfig(tp=2)),
    "pp2": (2, LayoutConfig(pp=2)),
    "pp2_vpp2": (2, LayoutConfig(pp=2, vpp=2)),
    "cp2": (2, LayoutConfig(cp=2)),
    "ep2": (2, LayoutConfig(ep=2)),
    "tp2_etp2": (2, LayoutConfig(tp=2, etp=2)),
    "cp2_ep2_dp2": (4, LayoutConfig(cp=2, ep=2)),
    "tp2_ep2_pp2": (8, LayoutConfig(tp=2, ep=2, pp=2)),
    "tp2_cp2_pp2_ep4": (8, LayoutConfig(tp=2, cp=2, pp=2, ep=4)),
}
OBJECTIVES = {"gspo": GspoConfig(clip_low=2e-3, clip_high=3e-3), "sft": SftConfig()}


@pytest.fixture(scope="module", params=OBJECTIVES)
def reference(request, checkpoint) -> tuple[str, Outcome]:
    """One rank, plain optimizer, everything in one micro-batch."""
    objective = OBJECTIVES[request.param]
    return request.param, outcomes(1, recipe_for(checkpoint, LayoutConfig(), objective, 1024, distributed=False))


def assert_same(found: Outcome, expected: Outcome) -> None:
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    torch.testing.assert_close(found.old_logp, expected.old_logp, rtol=0, atol=2e-5)
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_the_same_on_every_layout(name, reference, checkpoint):
    objective, expected = reference
    size, layout = LAYOUTS[name]
    assert_same(outcomes(size, recipe_for(checkpoint, layout, OBJECTIVES[objective], 160, distributed=True)), expected)


@pytest.mark.parametrize("max_tokens", [72, 128, 400])
def test_a_step_is_the_same_however_it_is_cut(max_tokens, reference, checkpoint):
    objective, expected = reference
    recipe = recipe_for(checkpoint, LayoutConfig(), OBJECTIVES[objective], max_tokens, distributed=True)
    assert_same(outcomes(1, recipe), expected)


def test_the_batch_is_hard_enough(reference):
    """The comparison would prove little if nothing were clipped or everything were."""
    objective, expected = reference
    if objective == "gspo":
        assert 0.1 < expected.metrics[1]["clip_fraction"] < 0.9
        assert expected.metrics[1]["abs_log_ratio_max"] > 2e-3


def test_the_batch_has_holes():
    batch = make_batch()
    trajectories: Trajectories = batch.rows(range(batch.index.n))
    assert (batch.index.trained_lens == 0).any()
    assert (batch.index.trained_lens < batch.index.response_lens).any()
    assert int(trajectories.loss_mask.sum()) == int(batch.index.trained_lens.sum())


def test_layout_is_what_was_asked():
    def sizes() -> tuple[int, int, int]:
        layout = init_layout(LayoutConfig(tp=2, cp=2))
        return (layout.tp, layout.cp, layout.dp)

    assert run_ranks(4, sizes) == [(2, 2, 1)] * 4
