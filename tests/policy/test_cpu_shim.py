"""What the CPU shim must get right, for Megatron would otherwise go on with wrong numbers."""

import importlib.metadata
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region

from megatron_gspo.policy import cpu
from megatron_gspo.policy.checkpoint import load_model, save_model
from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.local_linear import LocalColumnGroupedLinear
from megatron_gspo.policy.model import build_model, ddp_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper
from tests.policy import tiny
from tests.ranks import run_ranks


def test_inert_when_cuda_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_installed", False)
    before = torch.zeros, torch.cuda.synchronize, torch.Tensor.cuda
    cpu.install()
    assert (torch.zeros, torch.cuda.synchronize, torch.Tensor.cuda) == before and not cpu._installed


def test_another_megatron_is_not_patched(monkeypatch):
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.20\.0 is installed, but .* patches 0\.19\.2 only"):
        cpu.install()


def _uneven():
    rank = dist.get_rank()
    sizes = [3, 0, 1]
    mine = torch.full((sizes[rank], 2), float(rank), requires_grad=True)
    everything = gather_from_sequence_parallel_region(mine, group=dist.group.WORLD, output_split_sizes=sizes)
    (everything * torch.arange(1.0, 5.0)[:, None]).sum().backward()
    parts = torch.arange(4.0)[:, None] * (rank + 1)
    scattered = reduce_scatter_to_sequence_parallel_region(parts, dist.group.WORLD, input_split_sizes=sizes)
    return everything[:, 0].tolist(), mine.grad[:, 0].tolist(), scattered[:, 0].tolist()


def test_collectives_over_uneven_pieces():
    # Rows weigh 1 to 4 on each of three ranks, whose gradients add up. The ranks scatter 1 + 2 + 3 = 6 times 0 to 3.
    ranks = run_ranks(3, _uneven)
    assert [gathered for gathered, _, _ in ranks] == [[0, 0, 0, 2]] * 3
    assert [grad for _, grad, _ in ranks] == [[3, 6, 9], [], [12]]
    assert [scattered for _, _, scattered in ranks] == [[0, 6, 12], [], [18]]


def _run(folder, *, write: bool):
    """Two steps and a checkpoint, or the checkpoint loaded into fresh ranks; then one step more."""
    recipe = tiny.recipe(distributed=True)
    layout = init_layout(recipe.policy.layout)
    model = build_model(tiny.hf_config(), recipe.policy, layout)
    tiny.fill(model.chunks, layout)
    chunks = wrap(model, ddp_config(recipe.policy), layout)
    optimizer, scheduler = build_optimizer(recipe, chunks, layout)
    stepper = Stepper(model, chunks, layout, temperature=1.0)

    def step():
        stepper.forward_backward(
            tiny.micro_batches(layout), lambda batch, number, logp, entropy: (-logp.mean(), {}), sum(tiny.LENS)
        )
        optimizer.step()
        scheduler.step(1)

    if write:
        step()
        step()
        save_model(folder, chunks, optimizer, scheduler, layout)
    else:
        load_model(folder, chunks, optimizer, scheduler, layout)
    step()
    parameters = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    return parameters, {float(count) for count in _step_tensors(optimizer)}, scheduler.num_steps


def _step_tensors(optimizer):
    return [state["step"] for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]


def test_a_resumed_adamw_continues_bit_for_bit(tmp_path):
    # Megatron loads one `step` tensor into all parameters, and AdamW adds 1 to it once per parameter: 3 became 48.
    wrote = run_ranks(2, partial(_run, write=True), tmp_path)
    resumed = run_ranks(2, partial(_run, write=False), tmp_path)
    for (expected, *expected_counts), (found, *counts) in zip(wrote, resumed, strict=True):
        assert counts == expected_counts == [{3.0}, 3]
        assert all(map(torch.equal, expected, found))


def _state_before_any_step():
    recipe = tiny.recipe(distributed=True)
    layout = init_layout(recipe.policy.layout)
    model = build_model(tiny.hf_config(), recipe.policy, layout)
    optimizer, _ = build_optimizer(recipe, wrap(model, ddp_config(recipe.policy), layout), layout)
    groups = optimizer.state_dict()["optimizer"]["param_groups"]
    return {group["step"] for group in groups}, {float(count) for count in _step_tensors(optimizer)}


def test_an_adamw_that_never_stepped_has_state():
    # Without it Megatron cannot tell the step count (an assertion), nor where to load the moments to.
    assert run_ranks(2, _state_before_any_step) == [({0.0}, {0.0})] * 2


def _idle_experts():
    policy = tiny.policy()
    layout = init_layout(policy.layout)
    experts = build_model(tiny.hf_config(), policy, layout).chunks[0].decoder.layers[0].mlp.experts
    linear = experts.linear_fc1
    assert isinstance(linear, LocalColumnGroupedLinear)
    reports = []
    for counts in ([2, 0, 3, 0], [0, 0, 0, 0]):
        x = torch.ones(sum(counts), 32, requires_grad=True)
        out, _ = linear(x, counts)
        out.sum().backward()
        reports.append([float(parameter.grad.sum()) for parameter in linear.parameters()])
        linear.zero_grad()
    return reports


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    # Each of the 32 x 32 weights sees its expert's tokens, all ones: the sum is 1024 x tokens.
    assert run_ranks(1, _idle_experts) == [[[2048.0, 0.0, 3072.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]


def test_a_device_context_still_reaches_the_factories():
    """transformers builds models under `torch.device("meta")`; a factory that ignored it left RoPE uninitialised."""
    with torch.device("meta"):
        made = [torch.empty(1), torch.zeros(1), torch.ones(1), torch.tensor([1.0])]
    assert [tensor.device.type for tensor in made] == ["meta"] * 4
