"""The command line: quick help, clean refusals, and arguments that reach the command."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_gspo import cli
from megatron_gspo.config import load_recipe
from megatron_gspo.loop import launch
from tests.config.recipes import GSPO, edit, write


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_gspo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_answers_in_half_a_second_and_shows_examples():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = run("--help")
        seconds.append(time.perf_counter() - start)
    assert result.returncode == 0
    assert "megatron-gspo train recipes/demo_sort.yaml objective.clip_high=4e-4" in result.stdout
    assert min(seconds) < 0.5  # the least of three: other processes share the machine


HEAVY = {"torch", "megatron", "omegaconf", "numpy", "transformers", "sglang"}


def imported(command: str, suspects: set[str]) -> str:
    """Those of `suspects` that are imported once a fresh interpreter ran `cli.main` with `command`."""
    script = f"""
import sys
from megatron_gspo import cli
try:
    cli.main({command.split()!r})
except SystemExit:  # argparse leaves so after --help
    pass
print("imported:", *sorted({suspects!r} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", ["train --help", "show --help", "report --help"])
def test_help_of_a_command_imports_nothing_heavy(command):
    assert imported(command, HEAVY) == "imported:"


def test_show_needs_no_torch(tmp_path):
    assert imported(f"show {write(tmp_path, GSPO)}", {"torch", "megatron", "omegaconf"}) == "imported: omegaconf"


def test_refusal_is_one_clean_message_and_status_2(tmp_path):
    path = write(tmp_path, edit(GSPO, ("prompts: 32", "prompts: many")))
    result = run("train", path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"megatron-gspo: refused\n{path}:12: batch.prompts = 'many': expected int\n"


def test_show_prints_the_formula_and_a_recipe_that_loads_again(tmp_path, capsys):
    path = write(tmp_path, GSPO)
    assert cli.main(["show", str(path), "objective.clip_high=0.05", "run.dir=runs/wide"]) == 0
    printed = capsys.readouterr().out
    assert "1/N Σᵢ min( sᵢ Âᵢ , clip(sᵢ, 1 - 0.0003, 1 + 0.05) Âᵢ )" in printed
    shown = load_recipe(write(tmp_path, printed, "shown.yaml"))
    assert shown == load_recipe(path, ["objective.clip_high=0.05", "run.dir=runs/wide"])


def test_show_says_what_it_cannot_judge_and_refuses_what_train_refuses(tmp_path, capsys):
    path = write(tmp_path, GSPO)
    assert cli.main(["show", str(path)]) == 0
    assert f"not settled here: {path}:5: policy.hf = 'no/such/model': no such directory" in capsys.readouterr().err
    assert cli.main(["show", str(path), "reward.name=sort_digit"]) == 2
    printed = capsys.readouterr()
    assert "command line: reward.name" in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "this is a directory, not a recipe"),
        (lambda path: path.write_bytes(b"run: caf\xe9"), "not UTF-8 text: byte 0xe9 at offset 8"),
        (lambda path: None, "no such file"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, capsys, make, message):
    path = tmp_path / "recipe.yaml"
    make(path)
    for command in ("show", "train"):
        assert cli.main([command, str(path)]) == 2
        assert f"{path}: {message}" in capsys.readouterr().err


def test_train_needs_a_recipe_and_no_override():
    result = run("train")
    assert result.returncode == 2 and "required: RECIPE\n" in result.stderr


def test_show_documents_keys(capsys):
    assert cli.main(["show", "--keys", "rollout.sync"]) == 0
    assert "rollout.sync.bucket_mb: int, >= 1 = 512" in capsys.readouterr().out
    assert cli.main(["show", "--keys", "rollout.snyc"]) == 2
    assert "did you mean rollout.sync?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["show"], ["show", "r.yaml", "--keys"], ["show", "r.yaml", "--fast"], []])
def test_misuse_exits_with_status_2(arguments):
    with pytest.raises(SystemExit) as info:
        cli.main(arguments)
    assert info.value.code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.seed=7", "batch.prompts=64", "--resume"],
        ["--resume", "run.seed=7", "batch.prompts=64"],
        ["run.seed=7", "--resume", "batch.prompts=64"],
    ],
)
def test_train_hands_the_recipe_over_wherever_resume_stands(tmp_path, monkeypatch, arguments):
    calls = []

    def record(recipe, resume):
        calls.append((recipe, resume))
        return 3

    monkeypatch.setattr(launch, "main", record)
    assert cli.main(["train", str(write(tmp_path, GSPO)), *arguments]) == 3
    ((recipe, resume),) = calls
    assert (recipe.run.seed, recipe.batch.prompts, resume) == (7, 64, True)
