"""Names in a recipe that only the packages behind it know: rewards, tasks, Megatron's fields, the server's flags."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from megatron_gspo.config import Engine, Problem, Recipe, RecipeError

Checks = list[tuple[str, Callable[[], object]]]


def check_names(recipe: Recipe) -> None:
    """Raise RecipeError with every reward, task and model that does not do; imports neither torch nor Megatron."""
    checks: Checks = []
    if recipe.data.source not in ("jsonl", "parquet"):
        checks.append(("data.source", lambda: _task(recipe)))
    if recipe.reward:
        checks.append(("reward.name", lambda: _reward(recipe)))
    if recipe.rollout and not recipe.rollout.replay:
        checks.append(("policy.hf", lambda: _served(recipe)))
    _run(checks, recipe)


def check_fields(recipe: Recipe) -> None:
    """Raise RecipeError with every field that Megatron, and every flag that the server, does not take."""
    checks: Checks = [
        ("policy.megatron", lambda: _megatron(recipe)),
        ("policy.ddp", lambda: _ddp(recipe)),
        ("policy.optimizer.megatron", lambda: _optimizer(recipe)),
    ]
    if recipe.rollout and recipe.rollout.engine is Engine.managed:
        checks.append(("rollout.server.args", lambda: _server(recipe)))
    _run(checks, recipe)


def _run(checks: Checks, recipe: Recipe) -> None:
    problems = []
    for key, check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(Problem(key=key, reason=str(error)))
    if problems:
        raise RecipeError(problems, recipe.sources)


def _megatron(recipe: Recipe) -> None:
    from megatron_gspo.policy.overrides import checked_overrides
    from megatron_gspo.policy.transformer_config import TransformerConfig

    checked_overrides(TransformerConfig, recipe.policy.megatron, {}, "policy.megatron")


def _ddp(recipe: Recipe) -> None:
    from megatron_gspo.policy.model import ddp_config

    ddp_config(recipe.policy)


def _optimizer(recipe: Recipe) -> None:
    from megatron_gspo.policy.optimizer import optimizer_config

    optimizer_config(recipe.policy)


def _task(recipe: Recipe) -> None:
    from megatron_gspo.data.tasks import draw_from_task

    draw_from_task(recipe.data.source, recipe.run.seed, recipe.data.args)


def _reward(recipe: Recipe) -> None:
    from megatron_gspo.reward.reward import Reward

    assert recipe.reward is not None
    Reward(recipe.reward)


def _served(recipe: Recipe) -> None:
    """SGLang 0.5.23 builds every layer of a Qwen3-MoE sparse, and serves nonsense where some are dense."""
    from megatron_gspo.weights.families.qwen3_moe import sparse_layers

    path = Path(recipe.policy.hf) / "config.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; expected the directory of an HF checkpoint")
    hf = json.loads(path.read_text())
    if hf.get("model_type") == "qwen3_moe" and len(sparse_layers(hf)) < hf["num_hidden_layers"]:
        raise ValueError(f"{path} mixes dense and sparse layers, which SGLang's Qwen3-MoE does not build")


def _server(recipe: Recipe) -> None:
    from megatron_gspo.policy.cpu import on_gpu
    from megatron_gspo.rollout.command import launch_command

    assert recipe.rollout is not None
    if on_gpu() and "base_gpu_id" not in recipe.rollout.server.args:
        raise ValueError(
            "base_gpu_id is not set: the server would share the trainer's first GPU; name its own first one"
        )
    launch_command(
        recipe.policy.hf,
        recipe.rollout.server,
        host="127.0.0.1",
        port=1,
        on_cpu=not on_gpu(),
        context_length=1,
        environment=os.environ,
    )
