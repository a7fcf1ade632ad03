"""The critic: built beside the policy, scored before a step's updates, trained at each of them. It never leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.config import Mtp, PolicyConfig, Recipe
from megatron_gspo.loop.cut import Cut
from megatron_gspo.objective import Metric, ValueTokens, value_loss
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.model import check_vocabulary, ddp_config, read_hf_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.value import VALUE_HEAD, ValueLossFn, ValueStepper, build_value_model
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.load import load_hf


@dataclass(frozen=True, kw_only=True)
class Critic:
    """The value model and what trains it: its own DDP buffers, optimizer and schedule."""

    stepper: ValueStepper
    optimizer: Any
    scheduler: Any

    @property
    def trained(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"chunks": self.stepper.chunks, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def score(self, cuts: Sequence[Cut]) -> list[list[Tensor]]:
        """Values of every mini-batch and micro-batch, [t] fp32 on the last pipeline stage. Collective."""
        return [self.stepper.score(cut.micro_batches) for cut in cuts]


def build_critic(recipe: Recipe, layout: Layout, *, load: bool) -> Critic | None:
    """The critic of the recipe on the policy's layout, or None. Collective.

    `load`: its body starts from the HF checkpoint, its head from 0; otherwise a training checkpoint is to be loaded.
    """
    if recipe.critic is None:
        return None
    policy = critic_policy(recipe)
    key = "critic.hf" if recipe.critic.hf else "policy.hf"
    hf_config = read_hf_config(policy.hf, key)
    check_vocabulary(hf_config, key, recipe.policy.hf)
    model = build_value_model(hf_config, policy, layout)
    if load:
        load_hf(policy.hf, bind(model.chunks, hf_config, layout.pgs, fresh=(VALUE_HEAD,)))
    chunks = wrap(model, ddp_config(policy), layout)
    optimizer, scheduler = build_optimizer(replace(recipe, policy=policy), chunks, layout)
    return Critic(stepper=ValueStepper(model, chunks, layout), optimizer=optimizer, scheduler=scheduler)


def critic_policy(recipe: Recipe) -> PolicyConfig:
    """The recipe's policy section with what its critic section has of its own."""
    assert recipe.critic is not None
    policy = recipe.policy
    optimizer = policy.optimizer if recipe.critic.lr is None else replace(policy.optimizer, lr=recipe.critic.lr)
    return replace(policy, hf=recipe.critic.hf or policy.hf, optimizer=optimizer, mtp=Mtp.carry)


def make_value_loss(
    old_values: Sequence[Tensor],
    returns: Sequence[Tensor],
    *,
    num_tokens: int,
    clip: float | None,
    cp_group: dist.ProcessGroup,
) -> ValueLossFn:
    """The critic's loss of one mini-batch; lists hold one [t] tensor per micro-batch."""

    def loss(micro_batch: MicroBatch, number: int, values: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        tokens = ValueTokens(
            values=values,
            old_values=old_values[number],
            returns=returns[number],
            mask=micro_batch.loss_mask,
            offsets=micro_batch.offsets,
            rows=micro_batch.rows,
            group=cp_group,
        )
        return value_loss(tokens, num_tokens=num_tokens, clip=clip)

    return loss
