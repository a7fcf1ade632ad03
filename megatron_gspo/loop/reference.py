"""The reference policy of the KL penalty: a second model, which never changes."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.config import Mtp, PolicyObjective, Recipe
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.model import build_model, check_vocabulary, freeze, read_hf_config
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.load import load_hf


def build_reference(recipe: Recipe, layout: Layout) -> Stepper | None:
    """The reference policy on the policy's layout, or None for an objective without KL penalty. Collective.

    It scores the policy's own micro-batches with the same kernels and at the same temperature, so that the penalty of
    an unchanged policy is exactly 0. Costs the parameters once more (no gradients, no optimizer state) and one forward
    pass a step. A resumed run loads it again: it has no state.
    """
    objective = recipe.objective
    if not isinstance(objective, PolicyObjective) or objective.kl is None:
        return None
    assert recipe.rollout is not None
    directory, key = recipe.policy.hf, "policy.hf"
    if objective.kl.reference:
        directory, key = objective.kl.reference, "objective.kl.reference"
    hf_config = read_hf_config(directory, key)
    check_vocabulary(hf_config, key, recipe.policy.hf)
    model = build_model(hf_config, replace(recipe.policy, mtp=Mtp.carry), layout)
    load_hf(directory, bind(model.chunks, hf_config, layout.pgs))
    return Stepper(model, freeze(model), layout, recipe.rollout.temperature)
