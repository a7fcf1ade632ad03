"""Checkpoints are whole or not there, whatever interrupts them."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gspo.loop.checkpoints import RunState, checkpoint_dir, remove, whole_checkpoints
from megatron_gspo.loop.state import CheckpointFailed, agreed_checkpoints, is_saved, load_newest, save_checkpoint
from tests.ranks import run_ranks


def _write(directory: Path) -> None:
    (directory / f"rank_{dist.get_rank()}").write_text("policy")


def _save(run_dir: Path, state: RunState, *, write=_write, scores=None, keep: int = 0) -> None:
    models = {"policy": _write, "critic": write}
    save_checkpoint(run_dir, state, models, scores or {}, keep=keep, group=dist.group.WORLD)


def _load(run_dir: Path, models=None):
    return load_newest(whole_checkpoints(run_dir), models or {})


def _at(step: int, mini_batch: int = 0) -> RunState:
    return RunState(step=step, weight_version=step, mini_batch=mini_batch, record="r" if mini_batch else None)


def test_a_checkpoint_returns_what_was_saved(tmp_path):
    scores = {"old_logp": torch.tensor([-0.5, 0.0, -2.25]), "values": torch.tensor([1.5, 0.0, torch.inf])}
    state = _at(7, mini_batch=1)
    run_ranks(2, lambda: _save(tmp_path, state, scores=scores))
    assert run_ranks(2, lambda: is_saved(tmp_path, state, dist.group.WORLD)) == [True, True]
    assert run_ranks(1, lambda: is_saved(tmp_path, _at(7), dist.group.WORLD)) == [False]
    read = []
    loaded, loaded_scores = _load(tmp_path, {"policy": read.append, "critic": read.append})
    assert loaded == state and loaded_scores.keys() == scores.keys()
    assert all(torch.equal(loaded_scores[name], values) for name, values in scores.items())
    assert [path.name for path in read] == ["policy", "critic"]
    assert all((path / f"rank_{rank}").exists() for path in read for rank in range(2))


def test_the_newest_in_training_order_is_loaded(tmp_path):
    def save_three() -> None:
        for state in (_at(9), _at(10), _at(10, mini_batch=2)):
            _save(tmp_path, state)

    run_ranks(1, save_three)
    assert _load(tmp_path)[0] == _at(10, mini_batch=2)


def test_only_the_newest_are_kept(tmp_path):
    def save_five() -> None:
        for step in range(5):
            _save(tmp_path, _at(step), keep=2)

    run_ranks(2, save_five)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step_000003_000", "step_000004_000"]


def test_a_failure_while_writing_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    run_ranks(1, lambda: _save(tmp_path, _at(1), keep=1))

    def fail(directory: Path) -> None:
        _write(directory)
        raise OSError("write failed")  # Megatron does not say why

    with pytest.raises(
        AssertionError, match=r"saving .*step_000002_000 failed: OSError: write failed; No space left on the disk of"
    ):
        run_ranks(1, lambda: _save(tmp_path, _at(2), write=fail, keep=1))
    assert _load(tmp_path)[0] == _at(1)
    run_ranks(1, lambda: _save(tmp_path, _at(2), keep=1))
    assert _load(tmp_path)[0] == _at(2)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EOFError("Ran out of input"), r"step_000002_000 cannot be read: EOFError: Ran out of input; .*remove it"),
        (
            CheckpointException("load", {3: (EOFError("Ran out of input"), None)}),  # no Exception, one text a rank
            r"step_000002_000 cannot be read: rank 3: EOFError: Ran out of input; .*remove it",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_so_is_the_one_before(tmp_path, error, message):
    def save_two() -> None:
        for step in (1, 2):
            _save(tmp_path, _at(step))

    def fail(path: Path) -> None:
        raise error

    run_ranks(1, save_two)
    with pytest.raises(CheckpointFailed, match=message + r" to go on from the one before, step_000001_000"):
        _load(tmp_path, {"policy": fail})


def test_a_checkpoint_of_another_layout_is_not_called_damaged(tmp_path):
    def refuse(path: Path) -> None:
        raise ValueError("was written on another layout")

    run_ranks(1, lambda: _save(tmp_path, _at(1)))
    with pytest.raises(ValueError, match=r"^was written on another layout$"):
        _load(tmp_path, {"policy": refuse})


def test_what_the_user_keeps_beside_the_checkpoints_is_left_alone(tmp_path):
    """A copy of a checkpoint once counted as the newest, and was removed in its turn."""
    run_ranks(1, lambda: _save(tmp_path, _at(1)))
    saved = checkpoint_dir(tmp_path, _at(1))
    shutil.copytree(saved, saved.with_name(saved.name + ".bak"))
    saved.with_name("step_notes.txt").write_text("the good one")
    assert whole_checkpoints(tmp_path) == [saved]
    run_ranks(1, lambda: _save(tmp_path, _at(2), keep=1))
    left = sorted(path.name for path in saved.parent.iterdir())
    assert left == ["step_000001_000.bak", "step_000002_000", "step_notes.txt"]


def test_a_checkpoint_half_removed_is_none(tmp_path, monkeypatch):
    def killed(path: Path) -> None:
        (path / "run_state.json").unlink()
        raise KeyboardInterrupt

    run_ranks(1, lambda: _save(tmp_path, _at(1)))
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(checkpoint_dir(tmp_path, _at(1)))
    assert whole_checkpoints(tmp_path) == []


def test_training_order_is_not_that_of_letters(tmp_path):
    states = [_at(999_999, mini_batch=1000), _at(1_000_000), _at(1_000_000, mini_batch=7)]
    for state in reversed(states):
        checkpoint_dir(tmp_path, state).mkdir(parents=True)
    assert whole_checkpoints(tmp_path) == [checkpoint_dir(tmp_path, state) for state in states]


def _sees_another_folder(run_dir: Path) -> tuple[list[str], bool]:
    """On a node whose network file system still shows what was there before."""
    seen = run_dir if dist.get_rank() == 0 else run_dir / "stale"
    found = agreed_checkpoints(seen, dist.group.WORLD)
    return [path.name for path in found], is_saved(run_dir, _at(1), dist.group.WORLD)


def test_all_ranks_go_by_what_rank_0_sees(tmp_path):
    run_ranks(1, lambda: _save(tmp_path, _at(1)))
    assert run_ranks(2, _sees_another_folder, tmp_path) == [(["step_000001_000"], True)] * 2
