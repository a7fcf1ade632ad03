"""The report: numbers by hand, recipes compared key by key, and clear refusals of what is no run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_gspo import cli
from megatron_gspo.config import effective_yaml, load_recipe
from megatron_gspo.observe.curves import running_mean
from megatron_gspo.observe.report import differences, read_run, read_runs, shared_facts, write_report
from tests.config.recipes import GSPO, edit, write


def make_run(folder: Path, steps: int = 40, recipe: str = GSPO) -> Path:
    """A run of 40 planned steps whose reward grows by 0.01 a step; its third step has a ratio that is not finite."""
    folder.mkdir(parents=True)
    text = effective_yaml(load_recipe(write(folder, edit(recipe, ("steps: 10", "steps: 40")))))
    (folder / "recipe.yaml").write_text(text)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            record = {"step": step, "reward/mean": step / 100, "objective/ratio/p01": 0.5, "objective/ratio/p99": 2.0}
            record |= {"objective/clip_fraction": 0.0, "objective/token_log_ratio_min": -step / 10}
            if step == 2:
                record["objective/ratio/p01"] = None
            file.write(json.dumps(record) + "\n")
    return folder


def page(*folders: Path) -> list[str]:
    return write_report(read_runs(folders), folders[0].parent / "report").read_text().splitlines()


def test_a_cell_is_start_and_end_over_five_percent_of_the_steps(tmp_path):
    lines = page(make_run(tmp_path / "run"))
    assert "| steps | 40 |" in lines
    assert "| reward | 0.005 → 0.385 |" in lines  # of steps 0, 1 and 38, 39
    assert "| log-ratio of tokens, smallest | -0.10 → -3.90 |" in lines  # the extreme, not a mean
    assert not any("entropy (nats)" in line for line in lines)  # not recorded


def test_runs_stand_side_by_side_with_what_differs(tmp_path):
    grpo = edit(GSPO, ("name: gspo", "name: grpo"))
    lines = page(make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=7, recipe=grpo))
    assert lines[0] == "# a · b"
    assert "| steps | 40 | 7 of 40 |" in lines
    assert "| `objective.name` | gspo | grpo |" in lines
    assert "| `objective.clip_low` | 0.0003 | 0.2 |" in lines
    assert "| `objective.aggregation` | – | sequence_mean |" in lines
    assert "| reward | 0.005 → 0.385 | 0.000 → 0.060 |" in lines
    assert not any("run.dir" in line or "`batch.prompts` |" in line for line in lines)
    assert any(line.startswith("The same in all:") and "`batch.prompts: 32`" in line for line in lines)


def test_recipes_are_compared_key_by_key():
    one = {
        "run.dir": "a",
        "run.seed": 0,
        "reward.name": "x",
        "reward.args": {},
        "batch.prompts": 4,
        "objective.kl": None,
    }
    other = {"run.dir": "b", "run.seed": 1, "reward": None, "batch.prompts": 4, "objective.kl": None}
    assert shared_facts([one, other]) == {"batch.prompts": 4}
    assert differences([one, other]) == {"`run.seed`": ["0", "1"], "`reward`": ["set", "null"]}
    assert differences([one]) == {"`objective.kl`": ["null"]}


def test_curves_are_one_svg_that_the_same_runs_give_again(tmp_path):
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=1)])
    first, second = (write_report(runs, tmp_path / name).with_name("curves.svg").read_bytes() for name in "xy")
    assert first == second
    assert b"<svg" in first and b"clip fraction (log)" in first and b"entropy" not in first


def test_running_means_by_hand():
    nan = np.nan
    found = running_mean(np.array([1.0, 3.0, nan, 5.0, nan, nan]), 2)
    np.testing.assert_array_equal(found, [1.0, 2.0, 3.0, 5.0, 5.0, nan])


def test_runs_of_equal_name_are_told_apart_by_their_parents(tmp_path):
    runs = read_runs([make_run(tmp_path / "new" / "gspo", 1), make_run(tmp_path / "old" / "gspo", 1)])
    assert list(runs) == ["new/gspo", "old/gspo"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected the folder of a run .* but there is no .*recipe\.yaml"):
        read_run(tmp_path)


def test_a_run_before_its_first_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no step is recorded in metrics\.jsonl yet"):
        read_run(make_run(tmp_path / "run", steps=0))


@pytest.mark.parametrize(
    ("text", "reason"), [("a: [", "not YAML"), ("- a", "expected the sections of a recipe, got list")]
)
def test_a_broken_recipe_is_refused(tmp_path, text, reason):
    run = make_run(tmp_path / "run")
    (run / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_run(run)


def test_a_run_given_twice_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="given twice"):
        read_runs([run, run / "."])


def test_the_command_writes_beside_the_first_run_and_refuses_with_status_2(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name)) for name in "ab"]
    assert cli.main(["report", *runs]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report/report.md\n"
    assert cli.main(["report", runs[0], "--out", f"{tmp_path}/out", runs[1]]) == 0
    assert (tmp_path / "out" / "report.md").read_text().startswith("# a · b\n")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "megatron-gspo: refused" in capsys.readouterr().err


def test_the_recipe_of_a_run_is_read_by_dotted_keys(tmp_path):
    run = make_run(tmp_path / "run")
    whole = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe = read_run(run).recipe
    assert recipe["policy.optimizer.lr"] == whole["policy"]["optimizer"]["lr"] == 3e-4
    assert recipe["policy.megatron"] == {}
