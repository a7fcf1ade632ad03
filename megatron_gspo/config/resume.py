"""What a resumed run may change: how long and where it runs, not what it computes."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from megatron_gspo.config.problem import Problem, RecipeError
from megatron_gspo.config.schema import Recipe, Schedule

# Keys, or whole sections, that may differ from the recipe that the run was started with.
FREE = (
    "batch.max_tokens",
    "objective.on_policy_check",
    "observe",
    "reward.concurrency",
    "reward.on_error",
    "reward.timeout_s",
    "rollout.engine",
    "rollout.max_concurrency",
    "rollout.replay",
    "rollout.request_timeout_s",
    "rollout.retries",
    "rollout.server",
    "rollout.sync",
    "rollout.urls",
    "run.dir",
    "run.export_hf",
    "run.grace_s",
    "run.keep_checkpoints",
    "run.on_non_finite",
    "run.save_every",
    "run.steps",
    "run.threads",
    "run.timeout_s",
    "run.workers",
)


def check_resume(started: Recipe, resumed: Recipe) -> None:
    """Raise RecipeError naming every key by which `resumed` would compute something else than `started` did."""
    before, after = _leaves(started), _leaves(resumed)
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    problems = [
        Problem(
            key=key,
            value=after.get(key),
            reason=f"the run was started with {before.get(key)!r}, and a resumed run continues exactly",
            hint="set it back, or start a new run from an HF export (policy.hf)",
        )
        for key in changed
        if not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]
    optimizer = resumed.policy.optimizer
    decays = optimizer.schedule is not Schedule.constant and optimizer.decay_steps is None
    if decays and started.run.steps != resumed.run.steps:
        problems.append(
            Problem(
                key="run.steps",
                value=resumed.run.steps,
                reason=f"the run was started with {started.run.steps}, to which the learning rate decays",
                hint="set it back, or start a new run with policy.optimizer.decay_steps",
            )
        )
    if problems:
        raise RecipeError(problems, resumed.sources)


def _leaves(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value of everything that is no section."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, child in value.items():
                walk(f"{prefix}.{name}" if prefix else name, child)
        else:
            found[prefix] = value

    walk("", OmegaConf.to_container(OmegaConf.structured(recipe), enum_to_str=True))
    return found
