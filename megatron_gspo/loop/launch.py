"""`megatron-gspo train`: join the ranks that torchrun or srun started, or start local workers here."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from megatron_gspo.config import (
    Engine,
    Problem,
    Recipe,
    RecipeError,
    check_resume,
    effective_yaml,
    load_recipe,
    validate,
)
from megatron_gspo.loop.check import check_names
from megatron_gspo.loop.environment import Environment, read_environment

RECIPE_NAME = "recipe.yaml"
LAST_WORDS = 30  # lines of a failed rank's log that are shown
ECHO_S = 1.0  # within which the ranks that wait for a failed one fail too: the lowest may know the cause


def main(recipe: Recipe, resume: bool) -> int:
    """Run `recipe`; returns the exit code of the run. The effective recipe is kept in the run folder.

    Raises RecipeError when the run folder holds another run and `resume` is not asked for.
    """
    environment = read_environment()
    validate(recipe, environment.world_size if environment else recipe.run.workers)
    if environment:
        check_reach(recipe, environment)
    if environment is None or environment.rank == 0:
        check_names(recipe)
        prepare_run_dir(recipe, resume)
    if environment is None:
        return _run_local_workers(recipe, resume)
    from megatron_gspo.loop.worker import run_or_leave

    return run_or_leave(recipe, environment, resume)


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


def prepare_run_dir(recipe: Recipe, resume: bool) -> None:
    """Create the run folder and write the effective recipe. A run that failed before it had anything is overwritten.

    Raises RecipeError for a folder in use without `resume`, and with it for a recipe that would not continue that run.
    """
    folder = Path(recipe.run.dir)
    kept = folder / RECIPE_NAME
    if resume and kept.exists():
        check_resume(load_recipe(kept), recipe)
    elif any(folder.glob("checkpoints/*")) or any(folder.glob("rollouts/*")):
        raise RecipeError(
            [
                Problem(
                    key="run.dir",
                    value=recipe.run.dir,
                    reason="this folder already holds a run",
                    hint="continue it with --resume, choose another run.dir, or remove the folder",
                )
            ],
            recipe.sources,
        )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    kept.write_text(effective_yaml(recipe))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_local_workers(recipe: Recipe, resume: bool) -> int:
    folder = Path(recipe.run.dir)
    port = _free_port()
    command = [sys.executable, "-m", "megatron_gspo.loop", str(folder / RECIPE_NAME)]
    command += ["--resume"] if resume else []
    workers: list[subprocess.Popen] = []
    logs: list[Path] = []
    for rank in range(recipe.run.workers):
        place = Environment(
            rank=rank, world_size=recipe.run.workers, local_rank=rank, master_addr="127.0.0.1", master_port=port
        )
        log = folder / "logs" / f"rank_{rank}.log"
        logs.append(log)
        workers.append(_start_worker(command, place, log, recipe.run.threads))
    return _watch(workers, logs)


def _start_worker(command: list[str], place: Environment, log: Path, threads: int) -> subprocess.Popen:
    variables = os.environ | {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "OMP_NUM_THREADS": str(threads),
    }
    # Rank 0 speaks to the terminal; its errors and every other rank's words go to a log. Each worker has a session of
    # its own, so that Ctrl-C reaches the launcher alone, which forwards it once.
    with log.open("a") as sink:
        return subprocess.Popen(
            command,
            env=variables,
            stdout=None if place.rank == 0 else sink,
            stderr=sink,
            start_new_session=True,
        )


def _watch(workers: list[subprocess.Popen], logs: list[Path]) -> int:
    """Wait for all workers; forward signals to them; when one fails, end the others and show its last words."""

    def forward(number, frame):
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    try:
        while True:
            codes = [worker.poll() for worker in workers]
            if any(codes):
                time.sleep(ECHO_S)
                failed = [rank for rank, worker in enumerate(workers) if worker.poll()]
                for rank in failed[:2]:
                    print(f"[train] rank {rank} failed with exit code {workers[rank].returncode}; see {logs[rank]}:")
                    print("".join(logs[rank].read_text().splitlines(keepends=True)[-LAST_WORDS:]), flush=True)
                return max(1, *(workers[rank].returncode for rank in failed))
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.1)
    finally:
        _end(workers)


def _end(workers: list[subprocess.Popen], patience_s: float = 10.0) -> None:
    # Whole sessions: a rank that fails leaves the sampling process and Megatron's checkpoint writer behind.
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + patience_s
    for worker in workers:
        worker.wait(timeout=max(0.1, deadline - time.monotonic()))
