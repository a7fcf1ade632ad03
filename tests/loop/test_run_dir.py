"""Who may use a run folder, and what `--resume` makes of it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_gspo.config import Recipe, RecipeError, effective_yaml, load_recipe
from megatron_gspo.loop import launch, run_lock
from megatron_gspo.loop.checkpoints import RunState, checkpoint_dir
from megatron_gspo.loop.export import swap
from megatron_gspo.loop.joining import verdict_of
from megatron_gspo.loop.run_dir import admit, first_step, is_finished, write_recipe
from megatron_gspo.loop.run_lock import RunDirInUse, claim, share

RECIPE = """
run: {dir: DIR/run, steps: 3}
policy: {hf: no/such, optimizer: {lr: 1e-4}}
objective: {name: sft}
batch: {prompts: 4, max_tokens: 512}
data: {source: sort_digits}
"""
DONE = RunState(step=3, weight_version=3)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return load(tmp_path)


def load(directory: Path, *overrides: str) -> Recipe:
    path = directory / "mine.yaml"
    path.write_text(RECIPE.replace("DIR", str(directory)))
    return load_recipe(path, overrides)


@pytest.fixture
def run_dir(recipe, tmp_path) -> Path:
    """The folder of a run after its last step."""
    folder = tmp_path / "run"
    for state in (RunState(step=2, weight_version=2), DONE):
        put_state(checkpoint_dir(folder, state), state)
    put_state(folder / "hf", DONE)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "rollouts" / "step_000000").mkdir(parents=True)
    write_recipe(recipe)
    return folder


def put_state(folder: Path, state: RunState) -> None:
    folder.mkdir(parents=True)
    (folder / "run_state.json").write_text(json.dumps(asdict(state)))


def refusal(recipe: Recipe, resume: bool) -> str:
    with pytest.raises(RecipeError) as info:
        first_step(recipe, resume)
        admit(recipe, resume)
    return str(info.value)


@pytest.mark.parametrize("left", ["hf", "metrics.jsonl", "recipe.yaml", "checkpoints", "rollouts"])
def test_anything_of_a_run_is_left_alone(recipe, run_dir, left):
    for path in run_dir.iterdir():
        if path.name != left:
            subprocess.run(["rm", "-r", str(path)], check=True)
    assert f"this folder already holds a run ({left}" in refusal(recipe, resume=False)


def test_a_fresh_folder_is_taken(recipe, tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert admit(recipe, resume=False) is None and first_step(recipe, resume=False) == 0


def test_resuming_where_no_run_is_starts_none(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    assert "run: no run in this folder to resume; correct run.dir" in refusal(recipe, resume=True).replace("'", "")


def test_a_finished_run_is_known_by_its_steps_and_its_export(recipe, run_dir, tmp_path):
    assert admit(recipe, resume=True) == DONE and is_finished(recipe, DONE)
    assert not is_finished(load(tmp_path, "run.steps=4"), DONE)
    (run_dir / "hf" / "run_state.json").write_text(json.dumps(asdict(RunState(step=2, weight_version=2))))
    assert not is_finished(recipe, DONE)  # exported at an earlier end
    assert is_finished(load(tmp_path, "run.export_hf=false"), DONE)
    (run_dir / "hf" / "run_state.json").write_text("")  # as a crash of the machine leaves it: exported anew
    assert not is_finished(recipe, DONE)


def test_fewer_steps_than_were_trained_are_refused(run_dir, tmp_path):
    recipe = load(tmp_path, "run.steps=2")
    assert "command line: run.steps = 2: the newest checkpoint has trained 3 steps already" in refusal(recipe, True)


def test_half_a_step_past_the_last_is_refused(run_dir, recipe):
    half = RunState(step=3, weight_version=3, mini_batch=1, record="r")
    put_state(checkpoint_dir(run_dir, half), half)
    assert "run.steps = 3" in refusal(recipe, True)


def test_a_changed_recipe_is_refused_once_there_is_something_to_continue(run_dir, tmp_path):
    changed = load(tmp_path, "policy.optimizer.lr=1e-3")
    assert "the run was started with 0.0001" in refusal(changed, True)
    subprocess.run(["rm", "-r", str(run_dir / "checkpoints")], check=True)
    assert "the run was started with 0.0001" in refusal(changed, True)
    subprocess.run(["rm", "-r", str(run_dir / "rollouts")], check=True)
    assert admit(changed, resume=True) is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [(None, "FileNotFoundError"), ("{", "JSONDecodeError"), ("{}", "TypeError"), ("[1]", "TypeError")],
)
def test_a_checkpoint_that_does_not_say_its_position_is_named(recipe, run_dir, text, cause):
    newest = checkpoint_dir(run_dir, DONE)
    (newest / "run_state.json").unlink()
    if text is not None:
        (newest / "run_state.json").write_text(text)
    message = refusal(recipe, True)
    assert f"{newest / 'run_state.json'} cannot be read ({cause}" in message
    assert f"remove {newest} to go on from the one before" in message


def test_the_recipe_is_written_whole_or_not_at_all(recipe, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    path = write_recipe(recipe)
    assert path.read_text() == effective_yaml(recipe)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError):
        write_recipe(load(tmp_path, "run.seed=7"))
    assert path.read_text() == effective_yaml(recipe)


# ---- the lock


def test_a_second_claim_is_refused_and_says_who_holds_it(tmp_path):
    lock = claim(tmp_path / "run")
    with pytest.raises(RunDirInUse, match=f"the run of pid {os.getpid()} on "):
        claim(tmp_path / "run")
    os.close(lock)
    os.close(claim(tmp_path / "run"))


def test_whoever_shares_the_lock_keeps_it(tmp_path):
    lock = claim(tmp_path)
    script = (
        "import sys; from pathlib import Path; from megatron_gspo.loop.run_lock import share; share(Path(sys.argv[1]))"
    )
    script += "; print('shared', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "shared\n"
        os.close(lock)  # the launcher is gone
        with pytest.raises(RunDirInUse, match="or by ranks that it left"):
            claim(tmp_path)
        rank.stdin.close()
    os.close(claim(tmp_path))


def test_a_rank_whose_run_has_been_replaced_does_not_share(tmp_path):
    os.close(claim(tmp_path))
    other = os.open(tmp_path / "run.lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(RunDirInUse):
        share(tmp_path)
    os.close(other)


def test_where_files_cannot_be_locked_the_run_begins_with_a_word(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    os.close(claim(tmp_path))
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/run", "/proc/run", "a" * 300])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, place):
    (tmp_path / "file").touch()
    recipe = load(tmp_path, f"run.dir={tmp_path / place}")
    with pytest.raises(RecipeError, match=r"run\.dir = .*: cannot be written: "):
        launch._claim(recipe)


def test_a_rank_waits_for_a_folder_that_its_node_does_not_see_yet(tmp_path):
    """A network file system may say for a minute that a file is not there which was looked for before it was."""
    assert not (tmp_path / "run").exists()
    late = threading.Timer(1.0, claim, [tmp_path / "run"])
    late.start()
    share(tmp_path / "run", patience_s=30.0)
    late.join()


def test_a_rank_that_does_not_see_the_folder_at_all_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SEEN_S", 0.6)
    verdict = verdict_of(lambda: launch._share(load(tmp_path)))
    assert verdict.code == 2 and "rank 0 is there, this rank on" in verdict.text and "use a shared disk" in verdict.text


def test_a_lock_that_does_not_say_who_holds_it_is_held_all_the_same(tmp_path):
    lock = claim(tmp_path)
    os.ftruncate(lock, 5)
    with pytest.raises(RunDirInUse, match="in use by another run"):
        claim(tmp_path)


# ---- the export


def test_an_export_is_swapped_in_and_survives_being_killed_in_between(tmp_path):
    def folder(name: str, text: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(text)
        return tmp_path / name

    target = tmp_path / "hf"
    swap(folder(".hf.new", "1"), target)
    swap(folder(".hf.new", "2"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (target / "f").read_text() == "2"
    target.rename(tmp_path / ".hf.old")  # killed after the first of the two renames
    swap(folder(".hf.new", "3"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (target / "f").read_text() == "3"
    folder(".hf.old", "2")  # killed after the second
    swap(folder(".hf.new", "4"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (target / "f").read_text() == "4"
