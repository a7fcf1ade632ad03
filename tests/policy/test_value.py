"""The critic's values are HF's hidden states times its head; its gradients are those of one rank on every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from megatron_gspo.config.schema import Dtype, LayoutConfig, PolicyConfig
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import Model, ddp_config, freeze, wrap
from megatron_gspo.policy.value import VALUE_HEAD, ValueStepper, build_value_model
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.load import load_hf
from tests.policy import tiny
from tests.policy.test_model import LAYOUTS
from tests.ranks import run_ranks
from tests.weights.models import policy_config, read_config, write_checkpoint

HIDDEN = 32  # of tests.weights.models


def head_weight() -> torch.Tensor:
    return torch.linspace(-1, 1, HIDDEN)[None]


def loaded(directory: Path, layout: Layout, policy: PolicyConfig) -> Model:
    hf_config = read_config(directory)
    model = build_value_model(hf_config, policy, layout)
    load_hf(directory, bind(model.chunks, hf_config, layout.pgs, fresh=(VALUE_HEAD,)))
    return model


def heads(model: Model) -> list[torch.nn.Parameter]:
    return [chunk.output_layer.weight for chunk in model.chunks if chunk.post_process]


def scored(directory: Path, layout_config: LayoutConfig, *, set_head: bool) -> list[torch.Tensor]:
    """[t] of this rank's micro-batches, from the model that trains and from a frozen one, which must agree."""
    layout = init_layout(layout_config)
    policy = policy_config(directory, layout_config)
    model = loaded(directory, layout, policy)
    for weight in heads(model):
        assert not weight.any()
        if set_head:
            weight.data.copy_(head_weight())
    before = ValueStepper(model, freeze(model), layout).score(tiny.micro_batches(layout))
    for chunk in model.chunks:
        chunk.requires_grad_(True)
    values = ValueStepper(model, wrap(model, ddp_config(policy), layout), layout).score(tiny.micro_batches(layout))
    assert all(map(torch.equal, before, values))
    return values


@torch.no_grad()
def hf_values(directory: Path) -> list[torch.Tensor]:
    """The same for one rank, one document at a time through transformers."""
    body = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    held = tiny.trajectories(tiny.LENS)
    rows = []
    for micro_batch in tiny.MICRO_BATCHES:
        documents = [held.tokens[held.offsets[row] : held.offsets[row + 1]] for row in micro_batch]
        rows.append(torch.cat([body(ids[None]).last_hidden_state[0] @ head_weight()[0] for ids in documents]))
    return rows


@pytest.mark.parametrize("moe", [False, True], ids=["dense_tied", "moe"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_values_are_hidden_states_of_transformers_times_the_head(moe, layout, tmp_path):
    """Four layers of fp32 differ by some 1e-6; values are of size 10."""
    write_checkpoint(tmp_path, moe=moe, tie_word_embeddings=not moe, max_position_embeddings=512)
    size = 2 if layout else 1
    ranks = run_ranks(size, lambda: scored(tmp_path, LayoutConfig(**layout), set_head=True))
    assert [len(values) for values in ranks] == ([0, 4] if "pp" in layout else [4] * size)
    for values in filter(None, ranks):
        for found, expected in zip(values, hf_values(tmp_path), strict=True):
            torch.testing.assert_close(found[: len(expected)], expected, rtol=0, atol=3e-5)
            assert found.dtype == torch.float32 and expected.abs().max() > 3


def test_a_new_critic_says_zero(tmp_path):
    write_checkpoint(tmp_path, moe=True)
    (values,) = run_ranks(1, lambda: scored(tmp_path, LayoutConfig(), set_head=False))
    assert len(values) == 4 and not torch.cat(values).any()


def _step(policy: PolicyConfig, hf: dict[str, Any]):
    """(sum over this rank's tokens of squared values times position-dependent weights, gradients as `local_tensors`)"""
    layout = init_layout(policy.layout)
    model = build_value_model(hf, policy, layout)
    tiny.fill(model.chunks, layout)
    stepper = ValueStepper(model, wrap(model, ddp_config(policy), layout), layout)

    def loss(micro_batch, number, values):
        weight = (1.0 + 0.1 * micro_batch.position_ids[0]) * micro_batch.loss_mask
        value = (values.square() * weight).sum() / sum(tiny.LENS)
        return value, {"loss": float(value.detach())}

    metrics = stepper.forward_backward(tiny.micro_batches(layout), loss, num_tokens=sum(tiny.LENS))
    value = sum(metric["loss"] for metric in metrics) if layout.tp_rank == 0 else 0.0
    tiny.gradients_as_parameters(model.chunks)
    return value, tiny.local_tensors(model.chunks, layout)


def _run(size: int, tied: bool = False, **layout: Any):
    results = run_ranks(size, _step, tiny.policy(**layout), tiny.hf_config(tie_word_embeddings=tied))
    return sum(value for value, _ in results), tiny.global_tensors([tensors for _, tensors in results])


@cache
def _one_rank():
    return _run(1)


def _assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys() and expected[1][VALUE_HEAD].shape == (1, 32)
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max())
        assert scale > 0, f"{name} has no gradient: the comparison would prove nothing"
        rows = min(len(found[1][name]), len(gradient))  # other layouts pad the vocabulary otherwise
        torch.testing.assert_close(
            found[1][name][:rows], gradient[:rows], rtol=0, atol=2e-5 * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_changes_neither_loss_nor_gradients(name):
    size, layout = LAYOUTS[name]
    _assert_same(_run(size, **layout), _one_rank())


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_tied_embeddings_are_the_embedding_alone(layout):
    """Across stages, Megatron would add the output layer's gradient to the embedding's: there is none here."""
    _assert_same(_run(2 if layout else 1, tied=True, **layout), _one_rank())


def _dtypes():
    policy = tiny.policy(dtype=Dtype.bf16)
    layout = init_layout(policy.layout)
    model = build_value_model(tiny.hf_config(), policy, layout)
    tiny.fill(model.chunks, layout)
    stepper = ValueStepper(model, wrap(model, ddp_config(policy), layout), layout)
    values = stepper.score(tiny.micro_batches(layout))[0]
    (weight,) = heads(model)
    return values.dtype, weight.dtype, weight.main_grad.dtype, torch.equal(values, values.bfloat16().float())


def test_bf16_keeps_values_in_fp32():
    assert run_ranks(1, _dtypes) == [(torch.float32, torch.bfloat16, torch.float32, False)]


def _bound_as_a_policy(directory: Path) -> None:
    layout = init_layout(LayoutConfig())
    model = build_value_model(read_config(directory), policy_config(directory, LayoutConfig()), layout)
    bind(model.chunks, read_config(directory), layout.pgs)


def test_the_head_is_left_out_by_name_alone(tmp_path):
    """Bound without naming it, the value head is no 128 x 32 output layer."""
    write_checkpoint(tmp_path, moe=False, tie_word_embeddings=False)
    with pytest.raises(AssertionError, match=r"output_layer.weight is \[1, 32\], expected \[128, 32\]"):
        run_ranks(1, _bound_as_a_policy, tmp_path)
