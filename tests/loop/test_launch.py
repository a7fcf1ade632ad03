"""`train` as people and schedulers use it: real processes, tiny supervised runs, whatever ends them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import resource
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_gspo.loop.checkpoints import exported_state, read_state, whole_checkpoints

STEPS = 3
RECIPE = f"""
run: {{dir: DIR/run, steps: {STEPS}, save_every: 1}}
policy: {{hf: POLICY, dtype: fp32, optimizer: {{lr: 1e-3}}}}
objective: {{name: sft}}
batch: {{prompts: 4, max_tokens: 512}}
data: {{source: sort_digits, max_prompt_tokens: 32}}
"""
ENDLESS = "run.steps=100000"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "hf"
    tool = Path(__file__).parents[2] / "tools" / "make_demo_policy.py"
    subprocess.run([sys.executable, str(tool), "--out", str(path)], check=True, capture_output=True)
    return path


@pytest.fixture
def recipe(policy, tmp_path) -> Path:
    return write(tmp_path, policy)


def write(directory: Path, policy: Path) -> Path:
    path = directory / "mine.yaml"
    path.write_text(RECIPE.replace("DIR", str(directory)).replace("POLICY", str(policy)))
    return path


def start(
    recipe: Path, *arguments: str, limit: Callable[[], None] | None = None, **place: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_gspo", "train", str(recipe), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=os.environ | place, preexec_fn=limit, **pipes)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def train(recipe: Path, *arguments: str, code: int = 0) -> str:
    return finish(start(recipe, *arguments), code)


def wait_until(there: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def family(root: int) -> list[psutil.Process]:
    return [psutil.Process(root), *psutil.Process(root).children(recursive=True)]


@pytest.fixture(scope="module")
def finished(policy, tmp_path_factory) -> Path:
    """The folder of a run that has finished, with its recipe beside it. Tests work on a copy."""
    directory = tmp_path_factory.mktemp("finished")
    train(write(directory, policy))
    return directory


@pytest.fixture
def copy(finished, policy, tmp_path) -> Path:
    """The recipe of a copy of the finished run."""
    shutil.copytree(finished / "run", tmp_path / "run", symlinks=True)
    return write(tmp_path, policy)


def run_dir(recipe: Path) -> Path:
    return recipe.parent / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- one folder, one run


def test_a_finished_run_is_left_alone(copy):
    before = contents(run_dir(copy))
    assert "already holds a run" in train(copy, code=2)
    output = train(copy, "--resume")
    assert f"already finished: {STEPS} of {STEPS} steps" in output and f"steps {STEPS}-{STEPS}" in output
    assert contents(run_dir(copy)) == before | {"run.lock": (run_dir(copy) / "run.lock").read_bytes()}


def test_the_old_export_survives_a_failure_of_the_new_one(copy, policy):
    run, longer = run_dir(copy), ("--resume", f"run.steps={STEPS + 1}")
    old = contents(run / "hf")
    moved = copy.parent / "policy"
    shutil.copytree(policy, moved)
    (moved / "tokenizer_extra").mkdir()  # cannot be copied as a file, when all else is written
    for path in (copy, run / "recipe.yaml"):
        path.write_text(path.read_text().replace(str(policy), str(moved)))
    assert "IsADirectoryError" in train(copy, *longer, code=1)
    assert contents(run / "hf") == old
    (moved / "tokenizer_extra").rmdir()
    assert "trained policy" in train(copy, *longer)
    new = contents(run / "hf")
    assert new.keys() == old.keys() and new["config.json"] == old["config.json"]
    assert exported_state(run).step == STEPS + 1 and not list(run.glob(".hf*"))


def test_a_truncated_checkpoint_is_named(copy):
    before, newest = whole_checkpoints(run_dir(copy))[-2:]
    for path in (newest / "policy").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    output = train(copy, "--resume", f"run.steps={STEPS + 1}", code=1)
    assert f"the checkpoint {newest} cannot be read: rank 0: EOFError" in output
    assert f"remove it to go on from the one before, {before.name}" in output


def test_a_disk_that_takes_no_more_is_named_and_nothing_half_written_stays(recipe):
    def no_file_above_a_megabyte() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    output = finish(start(recipe, limit=no_file_above_a_megabyte), code=1)
    assert f"saving {run_dir(recipe)}/checkpoints/step_000001_000 failed" in output and "free on its disk" in output
    assert list((run_dir(recipe) / "checkpoints").iterdir()) == []


def test_a_run_without_a_checkpoint_begins_again(copy):
    shutil.rmtree(run_dir(copy) / "checkpoints")
    output = train(copy, "--resume", "run.steps=1")
    assert "holds no whole checkpoint: the run begins again" in output and "trained policy" in output
    assert [json.loads(line)["step"] for line in (run_dir(copy) / "metrics.jsonl").open()] == [0]


# ---- processes


@pytest.fixture
def running(recipe) -> Iterator[subprocess.Popen[str]]:
    """A run that would not end, in its steps."""
    process = start(recipe, ENDLESS, "run.workers=2")
    wait_until(lambda: len(whole_checkpoints(run_dir(recipe))) > 1, process)
    members = family(process.pid)
    yield process
    for member in members:
        if member.is_running():
            member.kill()
    process.communicate()


def test_a_folder_belongs_to_a_run_until_its_last_rank_has_ended(recipe, running):
    run = run_dir(recipe)
    before = (run / "recipe.yaml").read_text()
    for resume in ([], ["--resume"]):
        owner = f"in use by the run of pid {running.pid} on {socket.gethostname()}"
        assert owner in train(recipe, "run.steps=7", *resume, code=2)
    assert (run / "recipe.yaml").read_text() == before

    # Ranks that are suspended cannot notice that their launcher is gone.
    members, ranks = family(running.pid), psutil.Process(running.pid).children()
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    running.kill()
    running.wait()
    assert "or by ranks that it left" in train(recipe, ENDLESS, "--resume", code=2)
    for rank in ranks:
        rank.resume()
    assert not psutil.wait_procs(members, timeout=5)[1]


def test_nothing_survives_a_killed_launcher_whose_ranks_still_start(recipe):
    process = start(recipe, "run.workers=2")
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, process)
    time.sleep(0.5)  # they import
    members = family(process.pid)
    process.kill()
    assert not psutil.wait_procs(members, timeout=10)[1]


def test_a_stop_while_ranks_start_is_no_failure(recipe):
    process = start(recipe, "run.workers=2")
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, process)
    time.sleep(0.5)  # they import
    process.send_signal(signal.SIGTERM)
    assert "stopped while starting: nothing was trained" in finish(process)


# ---- ranks that somebody else started


def start_ranks(recipes: list[Path], *arguments: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(len(recipes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [
        start(recipe, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank, recipe in enumerate(recipes)
    ]


def test_joined_ranks_train_and_all_say_that_they_have(recipe):
    for process in start_ranks([recipe, recipe]):
        finish(process)
    assert exported_state(run_dir(recipe)).step == STEPS
    outputs = [finish(process) for process in start_ranks([recipe, recipe], "--resume")]
    assert "already finished" in outputs[0] and outputs[1] == ""


def test_a_refusal_of_rank_0_reaches_the_others(recipe):
    (run_dir(recipe) / "hf").mkdir(parents=True)
    outputs = [finish(process, code=2) for process in start_ranks([recipe, recipe])]
    assert "already holds a run" in outputs[0]


def test_what_one_rank_alone_does_not_see_ends_all(recipe):
    blind = recipe.with_name("blind.yaml")
    blind.write_text(recipe.read_text().replace("hf: /", "hf: /elsewhere/"))
    outputs = [finish(process, code=2) for process in start_ranks([recipe, blind])]
    assert "no such directory" in outputs[0] and "(on rank 1)" in outputs[0]
    assert not run_dir(recipe).exists()


# ---- terminals


def in_terminal(recipe: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A run whose output goes to a terminal of its own, and that terminal's other end."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "megatron_gspo", "train", str(recipe), *arguments]
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, preexec_fn=take_terminal, **pipes)
    os.close(theirs)
    os.set_blocking(ours, False)
    return process, ours


def test_a_run_whose_terminal_closes_saves_before_it_ends(recipe):
    """A line to a terminal that is gone once ended rank 0, and with it what was trained since the last checkpoint."""
    process, terminal = in_terminal(recipe, ENDLESS, "run.workers=2", "run.save_every=0")

    def has_trained() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)  # or the run would wait for somebody who reads
        metrics = run_dir(recipe) / "metrics.jsonl"
        return metrics.exists() and len(metrics.read_text().splitlines()) > 1

    wait_until(has_trained)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    (saved,) = whole_checkpoints(run_dir(recipe))
    assert read_state(saved).step > 1


def test_a_run_under_nohup_outlives_its_terminal(recipe):
    process = start(
        recipe, ENDLESS, "run.keep_checkpoints=0", limit=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    wait_until(lambda: whole_checkpoints(run_dir(recipe)), process)
    members = family(process.pid)
    for member in members:
        member.send_signal(signal.SIGHUP)
    reached = read_state(whole_checkpoints(run_dir(recipe))[-1]).step
    wait_until(lambda: read_state(whole_checkpoints(run_dir(recipe))[-1]).step > reached + 1, process)
    process.send_signal(signal.SIGTERM)
    assert "continue with --resume" in finish(process)
