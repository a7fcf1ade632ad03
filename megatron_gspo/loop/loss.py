"""Binds an objective of the recipe to micro-batches: the thin layer between the mathematics and Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.batch.trajectory import TrajectoryIndex
from megatron_gspo.config import GspoConfig, ObjectiveConfig, Recipe, SftConfig
from megatron_gspo.objective import Metric, group_relative, gspo_loss, policy_diagnostics, sft_loss
from megatron_gspo.policy.step import LossFn


@dataclass(frozen=True, kw_only=True)
class MiniBatchTerms:
    """What a mini-batch's losses need besides log-probabilities; fixed before it is cut into micro-batches."""

    advantages: Tensor  # [n] float64, of every trajectory of the batch
    trained_lens: Tensor  # [n] int64
    old_logp: Sequence[Tensor] | None  # per micro-batch [t]; None: the policy is its own old policy
    num_sequences: int  # of the mini-batch, over all ranks
    num_trained_tokens: int  # of the mini-batch, over all ranks
    cp_group: dist.ProcessGroup


def _gspo(config: GspoConfig, terms: MiniBatchTerms) -> LossFn:
    def loss(micro_batch: MicroBatch, number: int, logp: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        old_logp = logp.detach() if terms.old_logp is None else terms.old_logp[number]
        rows = micro_batch.rows.cpu()
        value, metrics = gspo_loss(
            logp,
            old_logp,
            micro_batch.loss_mask,
            micro_batch.offsets,
            terms.trained_lens[rows].to(logp.device),
            terms.advantages[rows].to(logp.device),
            rows=micro_batch.rows,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            num_sequences=terms.num_sequences,
            group=terms.cp_group,
        )
        return value, metrics | policy_diagnostics(
            old_logp, entropy.detach(), micro_batch.rollout_logprobs, micro_batch.loss_mask
        )

    return loss


def _sft(config: SftConfig, terms: MiniBatchTerms) -> LossFn:
    def loss(micro_batch: MicroBatch, number: int, logp: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        return sft_loss(logp, micro_batch.loss_mask, num_tokens=terms.num_trained_tokens)

    return loss


_LOSSES: dict[type[ObjectiveConfig], Callable[..., LossFn]] = {GspoConfig: _gspo, SftConfig: _sft}


def make_loss(config: ObjectiveConfig, terms: MiniBatchTerms) -> LossFn:
    """The loss function of `config` for one mini-batch."""
    return _LOSSES[type(config)](config, terms)


def advantages_of(recipe: Recipe, index: TrajectoryIndex) -> Tensor:
    """[n] float64: advantages of the whole batch; zeros for an objective that takes none."""
    if recipe.advantage is None:
        return index.rewards.new_zeros(index.n)
    return group_relative(
        index.rewards, index.group, normalize_std=recipe.advantage.normalize_std, eps=recipe.advantage.eps
    )
