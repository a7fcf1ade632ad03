"""`megatron-gspo train`: check everything, claim run.dir, then start local ranks or join those of torchrun or srun."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from megatron_gspo.config import Engine, Problem, Recipe, RecipeError, validate
from megatron_gspo.loop.check import check_inputs
from megatron_gspo.loop.environment import Environment, read_environment
from megatron_gspo.loop.joining import GO_ON, Verdict, agree, open_store, verdict_of
from megatron_gspo.loop.run_dir import admit, is_finished, write_recipe
from megatron_gspo.loop.run_lock import RunDirInUse, claim, share
from megatron_gspo.loop.workers import run_workers

SEEN_S = 60.0  # for so long a node may remember of a network file system that a file is not there


def main(recipe: Recipe, resume: bool) -> int:
    """Run `recipe`; returns the exit code of the run. The effective recipe is kept in the run folder.

    Raises RecipeError, before anything is started or written, for what cannot run here.
    """
    environment = read_environment()
    if environment:
        return _join(recipe, environment, resume)
    check(recipe, recipe.run.workers, resume)
    lock = _claim(recipe)
    try:
        verdict = _open(recipe, resume)
        if verdict.code is not None:
            print(verdict.text, flush=True)
            return verdict.code
        path = write_recipe(recipe)
        return run_workers(path, path.parent, resume=resume, workers=recipe.run.workers, threads=recipe.run.threads)
    finally:
        os.close(lock)


def check(recipe: Recipe, world_size: int, resume: bool) -> None:
    """Raise RecipeError with what this process sees to be wrong; nothing is written."""
    validate(recipe, world_size)
    check_inputs(recipe, resume)


def check_reach(recipe: Recipe, environment: Environment) -> None:
    """Raise RecipeError for a managed server that ranks on other nodes could not reach."""
    if recipe.rollout and recipe.rollout.engine is Engine.managed and environment.num_nodes > 1:
        problem = Problem(
            key="rollout.engine",
            value=recipe.rollout.engine.value,
            reason=f"the trainer spans {environment.num_nodes} nodes, a managed server is reachable on rank 0's alone",
            hint="start servers yourself and set rollout.engine: external and rollout.urls",
        )
        raise RecipeError([problem], recipe.sources)


def _join(recipe: Recipe, environment: Environment, resume: bool) -> int:
    """Run as one of the ranks that somebody else started: all of them run, or all leave with the same code."""

    def look() -> Verdict:
        check_reach(recipe, environment)
        check(recipe, environment.world_size, resume)
        return GO_ON

    def begin() -> Verdict:
        if environment.rank:
            return GO_ON
        _claim(recipe)  # held until this process ends
        verdict = _open(recipe, resume)
        if verdict.code is None:
            write_recipe(recipe)
        return verdict

    def hold() -> Verdict:
        if environment.rank:
            _share(recipe)
        return GO_ON

    store = open_store(environment, recipe.run.timeout_s)
    for question, ask in (("inputs", look), ("run_dir", begin), ("lock", hold)):
        verdict = agree(store, environment, question, verdict_of(ask))
        if verdict.code is not None:
            if environment.rank == 0:
                print(verdict.text, file=sys.stderr if verdict.code else sys.stdout, flush=True)
            return verdict.code
    from megatron_gspo.loop.worker import run_or_leave

    return run_or_leave(recipe, environment, resume, store)


def _claim(recipe: Recipe) -> int:
    try:
        return claim(Path(recipe.run.dir))
    except RunDirInUse as error:
        reason, hint = str(error), "wait for its end or stop it, or choose another run.dir"
    except OSError as error:
        reason, hint = f"cannot be written: {error.strerror}", "choose a run.dir that you may write"
    raise RecipeError([Problem(key="run.dir", value=recipe.run.dir, reason=reason, hint=hint)], recipe.sources)


def _share(recipe: Recipe) -> None:
    try:
        share(Path(recipe.run.dir), patience_s=min(SEEN_S, recipe.run.timeout_s / 2))
    except FileNotFoundError:
        reason, hint = f"rank 0 is there, this rank on {socket.gethostname()} does not see it", "use a shared disk"
    except RunDirInUse as error:
        reason, hint = str(error), "start all ranks again"
    else:
        return
    raise RecipeError([Problem(key="run.dir", value=recipe.run.dir, reason=reason, hint=hint)], recipe.sources)


def _open(recipe: Recipe, resume: bool) -> Verdict:
    """Whether the claimed folder lets the run begin, or has it finished already."""
    state = admit(recipe, resume)
    if resume and state is None:
        print(f"[train] {recipe.run.dir} holds no whole checkpoint: the run begins again", flush=True)
    if state is None or not is_finished(recipe, state):
        return GO_ON
    from megatron_gspo.observe import summary_table

    table = summary_table(recipe.run.dir)
    return Verdict(code=0, text=f"[train] already finished: {state.step} of {recipe.run.steps} steps\n\n{table}")
