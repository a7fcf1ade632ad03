"""Who may use run.dir, and what `--resume` finds there. Nothing that a run made is overwritten unless it goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_gspo.config import RECIPE_FILE, Problem, Recipe, RecipeError, check_resume, effective_yaml, load_recipe
from megatron_gspo.loop.checkpoints import EXPORT_DIR, RunState, exported_state, newest_state
from megatron_gspo.observe.metrics_log import METRICS_FILE

ROLLOUTS_DIR = "rollouts"
TRACES = (RECIPE_FILE, METRICS_FILE, EXPORT_DIR, "checkpoints/*", f"{ROLLOUTS_DIR}/*")


def place_problems(recipe: Recipe) -> Iterator[Problem]:
    """A run.dir that can be none, and inputs that lie where the run writes and replaces."""
    text = recipe.run.dir
    if not text.strip() or "\0" in text:
        yield Problem(key="run.dir", value=text, reason="expected the path of a folder")
        return
    run_dir = Path(text)
    if os.path.isfile(run_dir):  # False, where pathlib raises, for a name that the system refuses; claiming tells
        yield Problem(key="run.dir", value=text, reason="there is a file of that name", hint="choose another run.dir")
    for key, value in _inputs(recipe):
        inside = Path(value).resolve()
        replayed = key == "rollout.replay" and inside.is_relative_to((run_dir / ROLLOUTS_DIR).resolve())
        if inside.is_relative_to(run_dir.resolve()) and not replayed:  # a run that replays writes no rollouts
            reason = f"inside run.dir = {text}, where this run writes and replaces folders"
            yield Problem(key=key, value=value, reason=reason, hint="choose another run.dir")


def first_step(recipe: Recipe, resume: bool) -> int:
    """The step that the run will train first, from 0. Raises RecipeError with `resume` where there is no run."""
    run_dir = Path(recipe.run.dir)
    if not resume:
        return 0
    if not (run_dir / RECIPE_FILE).exists():
        raise _refused(recipe, "no run in this folder to resume", "correct run.dir, or start a run without --resume")
    state = _newest(recipe)
    return state.step if state else 0


def admit(recipe: Recipe, resume: bool) -> RunState | None:
    """The position to continue from; None for a run that begins. To be called with the folder claimed.

    Raises RecipeError for a folder in use without `resume`, and with it for a recipe that would not continue that run.
    """
    run_dir = Path(recipe.run.dir)
    if not resume:
        found = [trace for trace in TRACES if any(run_dir.glob(trace))]
        if found:
            what = f"this folder already holds a run ({', '.join(found)})"
            hint = "continue it with --resume, choose another run.dir, or remove the folder"
            raise _refused(recipe, what, hint)
        return None
    state = _newest(recipe)
    if state or any(run_dir.glob(f"{ROLLOUTS_DIR}/*")):  # rollouts of a run without checkpoint are trained on again
        check_resume(load_recipe(run_dir / RECIPE_FILE), recipe)
    if state and (state.step, state.mini_batch) > (recipe.run.steps, 0):
        problem = Problem(
            key="run.steps",
            value=recipe.run.steps,
            reason=f"the newest checkpoint has trained {state.step} steps already",
            hint=f"set at least {state.step}, or start a new run in another run.dir",
        )
        raise RecipeError([problem], recipe.sources)
    return state


def is_finished(recipe: Recipe, state: RunState) -> bool:
    """Whether nothing is left to do: all steps are trained and, if it is wanted, the policy after them is exported."""
    exported = not recipe.run.export_hf or exported_state(Path(recipe.run.dir)) == state
    return state.step == recipe.run.steps and exported


def write_recipe(recipe: Recipe) -> Path:
    """Put the effective recipe into run.dir, whole or not at all; returns its path."""
    path = Path(recipe.run.dir) / RECIPE_FILE
    staging = path.with_name(f".{RECIPE_FILE}.new")
    staging.write_text(effective_yaml(recipe), encoding="utf-8")
    os.replace(staging, path)
    return path


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    kl = getattr(recipe.objective, "kl", None)
    paths = {
        "policy.hf": recipe.policy.hf,
        "critic.hf": recipe.critic and recipe.critic.hf,
        "objective.kl.reference": kl and kl.reference,
        "rollout.replay": recipe.rollout and recipe.rollout.replay,
    }
    yield from ((key, path) for key, path in paths.items() if path and "\0" not in path)


def _newest(recipe: Recipe) -> RunState | None:
    try:
        return newest_state(Path(recipe.run.dir))
    except ValueError as error:
        raise _refused(recipe, str(error)) from error


def _refused(recipe: Recipe, reason: str, hint: str = "") -> RecipeError:
    return RecipeError([Problem(key="run.dir", value=recipe.run.dir, reason=reason, hint=hint)], recipe.sources)
