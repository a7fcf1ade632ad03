"""Whether a layout fits the world that it is to run on and the model that it is to cut."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_gspo.config.objectives import PolicyObjective
from megatron_gspo.config.problem import Problem, divisors
from megatron_gspo.config.schema import LayoutConfig, Recipe

# Names of the number of experts in the HF configurations of MoE families.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def world_problems(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Both the dense and the expert layout must tile the `world_size` trainer ranks."""
    layout = recipe.policy.layout
    dense, expert = layout.tp * layout.pp * layout.cp, layout.ep * layout.etp * layout.pp
    also = ("run.workers",)
    hint = f"valid: multiples of {math.lcm(dense, expert)} (run.workers, where `train` itself starts the ranks)"
    if world_size % dense:
        sizes = f"tp x pp x cp = {layout.tp} x {layout.pp} x {layout.cp} = {dense}"
        reason = f"{sizes} does not divide the world of {world_size} ranks"
        yield Problem(key="policy.layout", reason=reason, hint=hint, also=also)
    if world_size % expert:
        sizes = f"ep x etp x pp = {layout.ep} x {layout.etp} x {layout.pp} = {expert}"
        reason = f"{sizes} does not divide the world of {world_size} ranks"
        yield Problem(key="policy.layout", reason=reason, hint=hint, also=also)


def model_problems(recipe: Recipe) -> Iterator[Problem]:
    """Checks against `policy.hf`/config.json; none where that file cannot be seen from here, e.g. on a login node."""
    path = Path(recipe.policy.hf) / "config.json"
    if not path.is_file():
        return
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        yield Problem(key="policy.hf", value=recipe.policy.hf, reason=f"{path} is not JSON: {error}")
        return
    yield from _attention(recipe.policy.layout, model)
    yield from _layers(recipe.policy.layout, model)
    yield from _experts(recipe.policy.layout, model)
    yield from _vocabularies(recipe, model)
    if recipe.observe.routing_changes and _num_experts(model) is None:
        reason = "the model is dense: it has no experts that could change"
        yield Problem(key="observe.routing_changes", value=True, reason=reason, hint="remove it")


def _vocabularies(recipe: Recipe, model: dict[str, Any]) -> Iterator[Problem]:
    """Reference policy and critic read the policy's tokens."""
    kl = recipe.objective.kl if isinstance(recipe.objective, PolicyObjective) else None
    others = {"objective.kl.reference": kl and kl.reference, "critic.hf": recipe.critic and recipe.critic.hf}
    for key, directory in others.items():
        path = Path(directory or "") / "config.json"
        if not directory or not path.is_file():
            continue
        found, expected = json.loads(path.read_text(encoding="utf-8")).get("vocab_size"), model.get("vocab_size")
        if found != expected:
            reason = f"its vocab_size is {found}, that of policy.hf {expected}"
            yield Problem(key=key, value=directory, reason=reason, hint="name a checkpoint that has its tokenizer")


def _num_experts(model: dict[str, Any]) -> int | None:
    return next((model[name] for name in EXPERT_COUNTS if model.get(name)), None)


def _attention(layout: LayoutConfig, model: dict[str, Any]) -> Iterator[Problem]:
    heads = model.get("num_attention_heads")
    groups = model.get("num_key_value_heads", heads)
    if heads and heads % layout.tp:
        yield _indivisible("tp", layout.tp, "num_attention_heads", heads)
    elif groups and groups % layout.tp and layout.tp % groups:
        reason = f"neither divides nor is a multiple of the model's num_key_value_heads = {groups}"
        yield Problem(key="policy.layout.tp", value=layout.tp, reason=reason, hint=divisors(groups))


def _layers(layout: LayoutConfig, model: dict[str, Any]) -> Iterator[Problem]:
    layers, chunks = model.get("num_hidden_layers"), layout.pp * layout.vpp
    if layers and layers % chunks and layout.pipeline_layout is None:
        reason = f"pp x vpp = {layout.pp} x {layout.vpp} does not divide the model's num_hidden_layers = {layers}"
        hint = f"{divisors(layers)}; or cut unevenly with policy.layout.pipeline_layout"
        yield Problem(key="policy.layout.pp", value=layout.pp, reason=reason, hint=hint)


def _experts(layout: LayoutConfig, model: dict[str, Any]) -> Iterator[Problem]:
    experts = _num_experts(model)
    if experts is None:
        for name, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                reason = "the model is dense: it has no experts"
                yield Problem(key=f"policy.layout.{name}", value=size, reason=reason, hint="valid: 1")
        width = model.get("intermediate_size")
        if width and width % layout.tp:
            yield _indivisible("tp", layout.tp, "intermediate_size", width)
        return
    if experts % layout.ep:
        yield _indivisible("ep", layout.ep, "number of experts", experts)
    width = model.get("moe_intermediate_size")
    if width and width % layout.etp:
        yield _indivisible("etp", layout.etp, "moe_intermediate_size", width)


def _indivisible(name: str, size: int, what: str, number: int) -> Problem:
    reason = f"does not divide the model's {what} = {number}"
    return Problem(key=f"policy.layout.{name}", value=size, reason=reason, hint=divisors(number))
