"""Binds an objective of the recipe to micro-batches: the thin layer between the mathematics and Megatron's schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_gspo import objective as mathematics
from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.config import CorrectionConfig, PolicyObjective, Recipe
from megatron_gspo.objective import Correction, Metric, Objective, Tokens, Totals
from megatron_gspo.policy.step import LossFn


@dataclass(frozen=True, kw_only=True)
class MiniBatchTerms:
    """What a mini-batch's losses need besides log-probabilities; fixed before it is cut into micro-batches.

    Lists hold one [t] tensor per micro-batch.
    """

    advantages: Tensor | Sequence[Tensor]  # [n] float64, of every trajectory of the batch; or of every token
    trained_lens: Tensor  # [n] int64
    old_logp: Sequence[Tensor] | None  # None: the policy is its own old policy
    ref_logp: Sequence[Tensor] | None  # None: no reference policy
    totals: Totals
    cp_group: dist.ProcessGroup


def make_loss(recipe: Recipe, terms: MiniBatchTerms) -> LossFn:
    """The loss function of the recipe's objective for one mini-batch."""
    if not isinstance(recipe.objective, PolicyObjective):
        return _sft(terms)
    return _policy(recipe.objective, recipe.correction, terms)


def _sft(terms: MiniBatchTerms) -> LossFn:
    def loss(micro_batch: MicroBatch, number: int, logp: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        return mathematics.sft_loss(logp, micro_batch.loss_mask, num_tokens=terms.totals.num_tokens)

    return loss


def _policy(config: PolicyObjective, section: CorrectionConfig | None, terms: MiniBatchTerms) -> LossFn:
    objective, corrections = bind_objective(config), bind_corrections(section)
    aggregation = getattr(config, "aggregation", "sequence_mean")
    kl = (str(config.kl.estimator), config.kl.coef) if config.kl else None
    uses_rollout = bool(corrections) or config.uses_rollout_logp

    def loss(micro_batch: MicroBatch, number: int, logp: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        tokens = _tokens(micro_batch, number, logp, config, terms, uses_rollout=uses_rollout)
        weights = mathematics.token_weights(aggregation, tokens.trained_lens, terms.totals)
        value, metrics = mathematics.policy_loss(tokens, objective, weights, corrections=corrections, kl=kl)
        scored = logp.detach() if terms.old_logp is None else terms.old_logp[number]
        return value, metrics | mathematics.policy_diagnostics(
            scored, entropy.detach(), micro_batch.rollout_logprobs, micro_batch.loss_mask
        )

    return loss


def _tokens(
    micro_batch: MicroBatch,
    number: int,
    logp: Tensor,
    config: PolicyObjective,
    terms: MiniBatchTerms,
    *,
    uses_rollout: bool,
) -> Tokens:
    rows = micro_batch.rows.cpu()
    if config.anchored_to_rollout:
        old_logp = micro_batch.rollout_logprobs
    else:
        old_logp = logp.detach() if terms.old_logp is None else terms.old_logp[number]
    advantages = terms.advantages
    return Tokens(
        logp=logp,
        old_logp=old_logp,
        rollout_logp=micro_batch.rollout_logprobs if uses_rollout else None,
        ref_logp=terms.ref_logp[number] if terms.ref_logp is not None else None,
        mask=micro_batch.loss_mask,
        offsets=micro_batch.offsets,
        trained_lens=terms.trained_lens[rows].to(logp.device),
        rows=micro_batch.rows,
        advantages=advantages[rows].to(logp.device) if isinstance(advantages, Tensor) else advantages[number],
        group=terms.cp_group,
    )


def bind_objective(config: PolicyObjective) -> Objective:
    """The objective's function with the numbers of its recipe section, e.g. clip_low and clip_high."""
    return _bind(_OBJECTIVES[config.name], config)


def bind_corrections(section: CorrectionConfig | None) -> list[tuple[str, Correction]]:
    """The corrections that the recipe asks for, in the order of its schema, by name."""
    chosen = {name: getattr(section, name, None) for name in _CORRECTIONS}
    return [(name, _bind(_CORRECTIONS[name], config)) for name, config in chosen.items() if config is not None]


def _bind(function: Callable[..., Any], section: Any) -> Any:
    """`function` with its keyword-only arguments taken from the section's keys of the same names."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return partial(function, **{name: getattr(section, name) for name in names})


_OBJECTIVES: dict[str, Callable[..., mathematics.Surrogate]] = {
    "gspo": mathematics.gspo_token,
    "gspo_token": mathematics.gspo_token,
    "grpo": mathematics.clipped_tokens,
    "ppo": mathematics.clipped_tokens,
    "dapo": mathematics.clipped_tokens,
    "dr_grpo": mathematics.clipped_tokens,
    "sapo": mathematics.sapo,
    "cispo": mathematics.cispo,
    "gmpo": mathematics.gmpo,
    "vespo": mathematics.vespo,
    "dppo": mathematics.dppo,
    "minirl": mathematics.minirl,
}
_CORRECTIONS: dict[str, Callable[..., Any]] = {
    "truncate": mathematics.truncated_importance_sampling,
    "icepop": mathematics.icepop,
    "sequence_mask": mathematics.sequence_mask,
    "opsm": mathematics.off_policy_sequence_mask,
}


def totals_of(recipe: Recipe, trained_lens: Tensor) -> Totals:
    """Of a mini-batch whose sequences have `trained_lens` [n of the mini-batch]."""
    return Totals(
        num_sequences=len(trained_lens),
        num_tokens=int(trained_lens.sum()),
        max_tokens=recipe.rollout.max_new_tokens if recipe.rollout else 0,
    )
