"""`train` as people and schedulers use it: real processes, tiny supervised runs, whatever ends them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_gspo.loop.checkpoints import exported_state, whole_checkpoints

STEPS = 3
RECIPE = f"""
run: {{dir: DIR/run, steps: {STEPS}, workers: 2, save_every: 1}}
policy: {{hf: POLICY, dtype: fp32, layout: {{ep: 2}}, optimizer: {{lr: 1e-3}}}}
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


def start(recipe: Path, *arguments: str, **place: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_gspo", "train", str(recipe), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | place
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def train(recipe: Path, *arguments: str, code: int = 0) -> str:
    return finish(start(recipe, *arguments), code)


def wait_until(there: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 90) -> None:
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


@pytest.mark.parametrize("left", ["hf", "metrics.jsonl", "recipe.yaml", "checkpoints"])
def test_a_folder_that_holds_anything_of_a_run_is_left_alone(copy, left):
    for path in run_dir(copy).iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(run_dir(copy))
    assert "already holds a run" in train(copy, code=2)
    after = contents(run_dir(copy))
    after.pop("run.lock")
    assert after == before


def test_a_finished_run_says_so_at_once(copy):
    before = contents(run_dir(copy))
    output = train(copy, "--resume")
    assert f"already finished: {STEPS} of {STEPS} steps" in output
    assert f"steps {STEPS}-{STEPS}" in output and "rank" not in output
    assert contents(run_dir(copy)).keys() == before.keys()


def test_a_finished_run_without_its_export_makes_it(copy):
    shutil.rmtree(run_dir(copy) / "hf")
    assert "trained policy" in train(copy, "--resume")
    assert exported_state(run_dir(copy)).step == STEPS


def test_a_finished_run_goes_on_with_more_steps_and_replaces_its_export(copy):
    old = contents(run_dir(copy) / "hf")
    train(copy, "--resume", f"run.steps={STEPS + 1}")
    new = contents(run_dir(copy) / "hf")
    assert new.keys() == old.keys() and new["config.json"] == old["config.json"]
    assert exported_state(run_dir(copy)).step == STEPS + 1
    assert not list(run_dir(copy).glob(".hf*"))


def test_the_old_export_survives_a_failure_of_the_new_one(copy):
    old = contents(run_dir(copy) / "hf")
    # What save_hf copies last is not there to be copied: a folder of the tokenizer's name.
    policy = copy.parent / "policy"
    shutil.copytree(json_value(copy, "hf"), policy)
    (policy / "tokenizer_extra").mkdir()
    kept = run_dir(copy) / "recipe.yaml"
    kept.write_text(kept.read_text().replace(json_value(copy, "hf"), str(policy)))
    copy.write_text(copy.read_text().replace(json_value(copy, "hf"), str(policy)))
    assert "IsADirectoryError" in train(copy, "--resume", f"run.steps={STEPS + 1}", code=1)
    assert contents(run_dir(copy) / "hf") == old
    (policy / "tokenizer_extra").rmdir()
    train(copy, "--resume", f"run.steps={STEPS + 1}")
    assert exported_state(run_dir(copy)).step == STEPS + 1


def json_value(recipe: Path, key: str) -> str:
    return recipe.read_text().split(f"{key}: ")[1].split(",")[0]


def test_fewer_steps_than_were_trained_are_refused(copy):
    output = train(copy, "--resume", "run.steps=2", code=2)
    assert f"run.steps = 2: the newest checkpoint has trained {STEPS} steps already" in output


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda newest: (newest / "run_state.json").unlink(), "run_state.json cannot be read (FileNotFoundError"),
        (lambda newest: (newest / "run_state.json").write_text("{"), "run_state.json cannot be read (JSONDecodeError"),
    ],
)
def test_a_checkpoint_without_its_position_is_named(copy, damage, message):
    newest = whole_checkpoints(run_dir(copy))[-1]
    damage(newest)
    output = train(copy, "--resume", "run.steps=9", code=2)
    assert message in output and f"remove {newest} to go on from the one before" in output


def test_a_truncated_checkpoint_is_named_and_the_one_before_goes_on(copy):
    newest = whole_checkpoints(run_dir(copy))[-1]
    for path in (newest / "policy").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    output = train(copy, "--resume", f"run.steps={STEPS + 1}", code=1)
    assert f"the checkpoint {newest} cannot be read" in output
    assert f"remove it to go on from the one before, {whole_checkpoints(run_dir(copy))[-2].name}" in output
    shutil.rmtree(newest)
    train(copy, "--resume", f"run.steps={STEPS + 1}")
    assert exported_state(run_dir(copy)).step == STEPS + 1


def test_resuming_where_no_run_is_starts_none(recipe):
    assert "no run in this folder to resume" in train(recipe, "--resume", code=2)
    assert not run_dir(recipe).exists()


def test_a_run_without_a_checkpoint_begins_again(copy):
    shutil.rmtree(run_dir(copy) / "checkpoints")
    output = train(copy, "--resume", "run.steps=1")
    assert "holds no whole checkpoint: the run begins again" in output and "trained policy" in output
    assert [json.loads(line)["step"] for line in (run_dir(copy) / "metrics.jsonl").open()] == [0]


# ---- processes


@pytest.fixture
def running(recipe) -> Iterator[subprocess.Popen[str]]:
    """A run that would not end, in its steps."""
    process = start(recipe, ENDLESS)
    wait_until(lambda: len(whole_checkpoints(run_dir(recipe))) > 1, process)
    members = family(process.pid)
    yield process
    for member in members:
        if member.is_running():
            member.kill()
    process.communicate()


def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(recipe, running):
    owner = f"in use by the run of pid {running.pid} on {socket.gethostname()}"
    before = (run_dir(recipe) / "recipe.yaml").read_text()
    for resume in ([], ["--resume"]):
        assert owner in train(recipe, "run.steps=7", *resume, code=2)
    assert (run_dir(recipe) / "recipe.yaml").read_text() == before


def test_nothing_survives_a_killed_launcher(recipe, running):
    members = family(running.pid)
    assert len(members) >= 3
    running.kill()
    assert not psutil.wait_procs(members, timeout=5)[1]


def test_orphans_hold_the_folder(recipe, running):
    """Stopped ranks cannot notice that their launcher is gone; until they end, nobody else may train there."""
    ranks = psutil.Process(running.pid).children()
    for rank in ranks:
        rank.suspend()
    running.kill()
    running.wait()
    assert "or by ranks that it left" in train(recipe, ENDLESS, "--resume", code=2)
    for rank in ranks:
        rank.resume()
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_a_stop_while_ranks_start_is_no_failure(recipe):
    process = start(recipe)
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, process)
    time.sleep(0.3)  # they import
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


def test_a_refusal_of_rank_0_reaches_the_others(copy):
    outputs = [finish(process, code=2) for process in start_ranks([copy, copy])]
    assert "already holds a run" in outputs[0]


def test_what_one_rank_alone_does_not_see_ends_all(recipe):
    blind = recipe.with_name("blind.yaml")
    blind.write_text(recipe.read_text().replace("hf: /", "hf: /elsewhere/"))
    outputs = [finish(process, code=2) for process in start_ranks([recipe, blind])]
    assert "no such directory" in outputs[0] and "(on rank 1)" in outputs[0]
    assert not run_dir(recipe).exists()
