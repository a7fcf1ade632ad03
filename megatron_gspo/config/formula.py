"""The objective as a formula with the recipe's numbers in it, for people to read before they spend GPU hours."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from megatron_gspo.config.objectives import AdvantageConfig, GspoConfig
from megatron_gspo.config.schema import BatchConfig, Recipe, RolloutConfig


def objective_formula(recipe: Recipe) -> str:
    """The objective of `recipe` in Unicode text, several lines without a trailing newline."""
    return FORMULAS[recipe.objective.name](recipe)


def _gspo(recipe: Recipe) -> str:
    objective, batch = cast(GspoConfig, recipe.objective), recipe.batch
    rollout, advantage = cast(RolloutConfig, recipe.rollout), cast(AdvantageConfig, recipe.advantage)
    low, high = objective.clip_low, objective.clip_high
    std = f" / (std(r₁ … r_G) + {advantage.eps:g})" if advantage.normalize_std else ""
    ddof = ", std over G - 1" if advantage.normalize_std else ""
    sequences = batch.prompts * batch.samples // batch.mini_batches
    return f"""\
GSPO, maximised:

  J(θ)  = 1/N Σᵢ min( sᵢ Âᵢ , clip(sᵢ, 1 - {low:g}, 1 + {high:g}) Âᵢ )          i = 1 … N
  sᵢ(θ) = exp( 1/|yᵢ| Σₜ [ log π_θ(yᵢₜ | x, yᵢ,<t) - log π_old(yᵢₜ | x, yᵢ,<t) ] )
  Âᵢ    = (rᵢ - mean(r₁ … r_G)){std}

  N     = {sequences} sequences per optimizer step: {batch.prompts} prompts x {batch.samples} samples, {_cut(batch)}
  G     = {batch.samples} responses to one prompt{ddof}
  |yᵢ|  = response tokens that train; every sequence weighs 1/N, whatever its length
  π     = softmax(logits / {rollout.temperature:g}){_truncation(rollout)}
  π_old = {_old_policy(batch.mini_batches)}"""


def _sft(recipe: Recipe) -> str:
    batch = recipe.batch
    return f"""\
Cross-entropy on given responses, minimised:

  L(θ) = - 1/T Σᵢ Σₜ log π_θ(yᵢₜ | x, yᵢ,<t)          i = 1 … N

  N    = {batch.prompts // batch.mini_batches} sequences per optimizer step: {batch.prompts} prompts, {_cut(batch)}
  T    = Σᵢ |yᵢ|, all response tokens of the mini-batch; every token weighs 1/T
  π    = softmax(logits)"""


def _cut(batch: BatchConfig) -> str:
    return "1 mini-batch" if batch.mini_batches == 1 else f"{batch.mini_batches} mini-batches"


def _old_policy(mini_batches: int) -> str:
    if mini_batches == 1:
        return "sg(π_θ), as there is one mini-batch a step; no scoring pass, and every ratio is 1"
    return f"the trainer's weights before the step; scored once, for all {mini_batches} mini-batches"


def _truncation(rollout: RolloutConfig) -> str:
    cuts = [f"top_p {rollout.top_p:g}"] * (rollout.top_p < 1) + [f"top_k {rollout.top_k}"] * (rollout.top_k > 0)
    return f"; responses are sampled with {' and '.join(cuts)}, which the ratios do not know of" if cuts else ""


# One for every entry of OBJECTIVES.
FORMULAS: dict[str, Callable[[Recipe], str]] = {"gspo": _gspo, "sft": _sft}
