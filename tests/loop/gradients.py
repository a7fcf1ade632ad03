"""Full gradients of a training loop on any layout, after the reduction over data parallelism, under HF names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_gspo.loop import rl
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.step import Runner
from megatron_gspo.policy.value import VALUE_HEAD
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import buckets, gather, plan_export


def keep_gradients(folder: str) -> None:
    """From now on the loop of this rank writes the gradient of every mini-batch into `folder` of its run.dir, before
    the optimizer sees it. Every rank calls it."""
    apply, numbers = rl._apply, Counter[tuple[str, str]]()

    def keep_and_apply(run: Any, optimizer: Any, scheduler: Any, what: str, num_tokens: int) -> Any:
        directory = run.recipe.run.dir
        number = numbers[directory, what]
        numbers[directory, what] += 1
        is_critic = what == "critic"
        gradient = full_gradient(run.critic.stepper if is_critic else run.stepper, run.layout, is_critic=is_critic)
        _save(Path(directory) / folder, f"{what}_{number}", gradient)
        return apply(run, optimizer, scheduler, what, num_tokens)

    rl._apply = keep_and_apply


def full_gradient(stepper: Runner, layout: Layout, *, is_critic: bool) -> dict[str, Tensor]:
    """HF tensor (and "value_head" of a critic) -> its gradient, whole, fp32; each on one of the ranks. Collective."""
    unshard(stepper.chunks)
    chunks = stepper.model.chunks
    binding: Any = bind(chunks, stepper.model.hf_config, layout.pgs, fresh=(VALUE_HEAD,) if is_critic else ())
    kept = [claim for claim in binding.claims if not is_critic or VALUE_HEAD not in claim.rule.megatron]
    claims = {claim.index: replace(claim, index=place) for place, claim in enumerate(kept)}
    bound = [
        # Buffers (expert biases) have none: they stand for themselves.
        replace(
            entry, claim=claims[entry.claim.index], parameter=getattr(entry.parameter, "main_grad", entry.parameter)
        )
        for entry in binding.bound
    ]
    found: dict[str, Tensor] = {}
    for bucket in buckets(plan_export(replace(binding, claims=tuple(claims.values()), bound=tuple(bound))), 2**30):
        found |= dict(gather(bucket))
    if is_critic and chunks[-1].post_process and layout.pgs.tp.rank() == layout.pgs.dp_cp.rank() == 0:
        found["value_head"] = chunks[-1].get_parameter(VALUE_HEAD).main_grad
    return found


def unshard(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make `main_grad` whole on every rank. The distributed optimizer has each rank hold the sum of its own shard of
    every bucket, and leftovers of its own elsewhere. Collective over data parallelism."""
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _save(directory: Path, name: str, gradient: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}/{key}": tensor.contiguous() for key, tensor in gradient.items()}
    save_file(tensors, directory / f"{name}_rank{dist.get_rank()}.safetensors")


def load_gradients(directory: Path) -> dict[str, Tensor]:
    """MODEL_NUMBER/TENSOR -> gradient, of all mini-batches that `keep_gradients` wrote; no tensor from two ranks."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys(), f"{path}: {sorted(found.keys() & part.keys())} are of another rank too"
        found |= part
    return found
