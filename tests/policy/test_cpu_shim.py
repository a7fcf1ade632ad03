"""What the CPU shim must get right, for Megatron would otherwise go on with wrong numbers."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region

from megatron_gspo.policy import cpu
from megatron_gspo.policy.checkpoint import load_policy, save_policy
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
    # Rows weigh 1, 2, 3, 4 on each of three ranks, whose gradients add up. The ranks scatter 1 + 2 + 3 = 6 times 0 .. 3.
    ranks = run_ranks(3, _uneven)
    assert [gathered for gathered, _, _ in ranks] == [[0, 0, 0, 2]] * 3
    assert [grad for _, grad, _ in ranks] == [[3, 6, 9], [], [12]]
    assert [scattered for _, _, scattered in ranks] == [[0, 6, 12], [], [18]]


def _trained(steps: int):
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

    for _ in range(steps):
        step()
    return SimpleNamespace(chunks=chunks, optimizer=optimizer, scheduler=scheduler, layout=layout, step=step)


def _adam_steps(optimizer):
    inner = [chained.optimizer for chained in optimizer.chained_optimizers]
    return [state["step"] for adam in inner for state in adam.state.values()]


def _resume(folder):
    run = _trained(steps=2)
    save_policy(folder, run.chunks, run.optimizer, run.scheduler, run.layout)
    run.step()
    expected = [parameter.detach().clone() for parameter in run.chunks[0].parameters()]

    load_policy(folder, run.chunks, run.optimizer, run.scheduler, run.layout)
    steps = _adam_steps(run.optimizer)
    run.step()
    after = [float(step) for step in _adam_steps(run.optimizer)]
    same = all(map(torch.equal, expected, run.chunks[0].parameters()))
    return len({step.data_ptr() for step in steps}) == len(steps), set(after), same


def test_a_loaded_adamw_counts_its_steps_once(tmp_path):
    # Megatron loads one `step` tensor into all parameters; AdamW then adds 1 to it per parameter: 3 steps became 96.
    assert run_ranks(2, _resume, tmp_path) == [(True, {3.0}, True)] * 2


def _fresh_process_resumes(folder, write: bool):
    run = _trained(steps=2 if write else 0)
    if write:
        save_policy(folder, run.chunks, run.optimizer, run.scheduler, run.layout)
    else:
        load_policy(folder, run.chunks, run.optimizer, run.scheduler, run.layout)
    run.step()
    return [parameter.detach().clone() for parameter in run.chunks[0].parameters()], run.scheduler.num_steps


def test_an_adamw_that_never_stepped_loads_a_checkpoint(tmp_path):
    wrote = run_ranks(2, _fresh_process_resumes, tmp_path, True)
    loaded = run_ranks(2, _fresh_process_resumes, tmp_path, False)
    for (expected, expected_steps), (found, steps) in zip(wrote, loaded, strict=True):
        assert steps == expected_steps == 3
        assert all(map(torch.equal, expected, found))


def _save_before_any_step(folder):
    run = _trained(steps=0)
    save_policy(folder, run.chunks, run.optimizer, run.scheduler, run.layout)
    return {float(step) for step in _adam_steps(run.optimizer)}


def test_a_checkpoint_before_the_first_step(tmp_path):
    assert run_ranks(2, _save_before_any_step, tmp_path) == [{0.0}] * 2


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
