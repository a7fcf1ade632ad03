"""What a recipe names and only other packages or the disk know: checkpoints, data, rewards, records, Megatron's fields.

Everything that can be known before a process starts is refused here, with the key and the place that set it.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_gspo.config import Engine, Problem, Recipe, RecipeError
from megatron_gspo.config.fit import world_problems
from megatron_gspo.loop.run_dir import first_step, place_problems

FILE_SOURCES = ("jsonl", "parquet")
RECORD_ARRAYS = "batch.safetensors"

Check = Callable[[Recipe], object]


def check_inputs(recipe: Recipe, resume: bool = False) -> None:
    """Raise RecipeError with all that is wrong with what `recipe` names. Imports torch and Megatron only for a recipe
    that sets their fields."""
    problems = [*place_problems(recipe), *checkpoint_problems(recipe), *name_problems(recipe)]
    refuse(problems, recipe)  # the rest needs a run.dir, and takes seconds
    refuse([*replay_problems(recipe, first_step(recipe, resume)), *field_problems(recipe)], recipe)


def check_shown(recipe: Recipe) -> list[Problem]:
    """Raise RecipeError as `check_inputs` does, but return what may be otherwise on the machine that trains: HF
    checkpoints that are not seen, a layout meant for torchrun or srun, fields that only Megatron knows."""
    world = list(world_problems(recipe, recipe.run.workers))
    joins = recipe.run.workers == 1
    refuse([*place_problems(recipe), *name_problems(recipe), *([] if joins else world)], recipe)
    overrides = {
        "policy.megatron": recipe.policy.megatron,
        "policy.ddp": recipe.policy.ddp,
        "policy.optimizer.megatron": recipe.policy.optimizer.megatron,
    }
    unknown = [Problem(key=key, reason="`train` checks these fields") for key, fields in overrides.items() if fields]
    return [*checkpoint_problems(recipe), *(world if joins else []), *unknown]


def refuse(problems: Iterable[Problem], recipe: Recipe) -> None:
    """Raise RecipeError where there are problems."""
    found = list(problems)
    if found:
        raise RecipeError(found, recipe.sources)


def hf_checkpoints(recipe: Recipe) -> dict[str, str]:
    """Key -> directory of every HF checkpoint that the run reads."""
    kl = getattr(recipe.objective, "kl", None)
    named = {
        "policy.hf": recipe.policy.hf,
        "critic.hf": recipe.critic and recipe.critic.hf,
        "objective.kl.reference": kl and kl.reference,
    }
    return {key: path for key, path in named.items() if path}


def checkpoint_problems(recipe: Recipe) -> Iterator[Problem]:
    """HF checkpoints that are not there, such as on a login node that does not see the disk."""
    for key, path in hf_checkpoints(recipe).items():
        hint = "name the directory of an HF checkpoint on a local or shared disk"
        if not os.path.isdir(path):  # False, where pathlib raises, for a name that the system refuses
            yield Problem(key=key, value=path, reason="no such directory", hint=hint)
        elif not (Path(path) / "config.json").is_file():
            yield Problem(key=key, value=path, reason="no config.json in this directory", hint=hint)
        elif not any(Path(path).glob("*.safetensors")):
            yield Problem(key=key, value=path, reason="no *.safetensors in this directory", hint=hint)


def name_problems(recipe: Recipe) -> list[Problem]:
    """Data, reward and model that do not do; imports neither torch nor Megatron."""
    checks: list[tuple[str, Check]] = [("data.path" if recipe.data.source in FILE_SOURCES else "data.source", _data)]
    if recipe.reward:
        checks.append(("reward.name", _reward))
    if recipe.rollout and not recipe.rollout.replay:
        checks.append(("policy.hf", _served))
    return _collect(checks, recipe)


def field_problems(recipe: Recipe) -> list[Problem]:
    """Fields that Megatron, and flags that the server, does not take; imports what takes them."""
    checks: list[tuple[str, Check]] = []
    if recipe.policy.megatron:
        checks.append(("policy.megatron", _megatron))
    if recipe.policy.ddp:
        checks.append(("policy.ddp", _ddp))
    if recipe.policy.optimizer.megatron:
        checks.append(("policy.optimizer.megatron", _optimizer))
    if recipe.rollout and recipe.rollout.engine is Engine.managed and not recipe.rollout.replay:
        checks.append(("rollout.server.args", _server))
    return _collect(checks, recipe)


def replay_problems(recipe: Recipe, first: int) -> Iterator[Problem]:
    """Every step from `first` on needs its record, before the first of them is trained."""
    if not recipe.rollout or not recipe.rollout.replay:
        return
    folder = Path(recipe.rollout.replay)
    missing = [
        f"step_{step:06d}"
        for step in range(first, recipe.run.steps)
        if not (folder / f"step_{step:06d}" / RECORD_ARRAYS).is_file()
    ]
    if missing:
        reason = f"holds no record {missing[0]}" + (f", nor {len(missing) - 1} others" if len(missing) > 1 else "")
        hint = f"run.steps = {recipe.run.steps} needs step_{first:06d} to step_{recipe.run.steps - 1:06d}; lower it"
        yield Problem(key="rollout.replay", value=recipe.rollout.replay, reason=reason, hint=hint)


def _collect(checks: Iterable[tuple[str, Check]], recipe: Recipe) -> list[Problem]:
    problems = []
    for key, check in checks:
        try:
            check(recipe)
        except ValueError as error:
            problems.append(_blame(key, str(error)))
    return problems


def _blame(key: str, message: str) -> Problem:
    """A message of one key in the section `key` begins with it, as in `policy.megatron.foo: no such field`."""
    name, colon, reason = message.partition(": ")
    inner = colon and name.startswith(f"{key}.")
    return Problem(key=name if inner else key, reason=reason if inner else message)


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


def _data(recipe: Recipe) -> None:
    """Opens the data, which checks every line of a JSON Lines file, and makes the first prompt."""
    if recipe.data.source == "jsonl":
        from megatron_gspo.data.jsonl import JsonlRows

        first = JsonlRows(recipe.data)[0]
    elif recipe.data.source == "parquet":
        from megatron_gspo.data.parquet import ParquetRows

        first = ParquetRows(recipe.data)[0]
    else:
        from megatron_gspo.data.tasks import draw_from_task

        first = draw_from_task(recipe.data.source, recipe.run.seed, recipe.data.args)(0, 0)
    if recipe.rollout is None and first.response is None:
        raise ValueError(
            f"the objective '{recipe.objective.name}' imitates responses, and {first.id} has none as text in the field "
            f"'{recipe.data.response_key}' (data.response_key); its fields: {', '.join(first.meta)}"
        )


def _reward(recipe: Recipe) -> None:
    from megatron_gspo.reward.reward import Reward

    assert recipe.reward is not None
    try:
        Reward(recipe.reward)
    except ValueError:
        raise
    except Exception as error:  # the user's module, as it is imported
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"reward.name = '{recipe.reward.name}': its module fails as it is imported: {type(error).__name__}: "
            f"{error} ({at.filename}:{at.lineno})"
        ) from error


def _served(recipe: Recipe) -> None:
    """SGLang 0.5.23 builds every layer of a Qwen3-MoE sparse, and serves nonsense where some are dense. Started on
    codes, it expects codes in weight updates."""
    from megatron_gspo.weights.families.qwen3_moe import sparse_layers

    path = Path(recipe.policy.hf) / "config.json"
    if not path.is_file():  # `checkpoint_problems` says so
        return
    hf = json.loads(path.read_text())
    if hf.get("quantization_config"):
        raise ValueError(
            f"{path} has a quantization_config: SGLang would serve codes, and be sent weights in "
            f"{recipe.policy.dtype.name}; decode the checkpoint with tools/hf_to_megatron.py and "
            "tools/megatron_to_hf.py, and name that"
        )
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
