"""One page on one run or several: what differs between their recipes, where they began and ended, and the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_gspo.config import RECIPE_FILE
from megatron_gspo.observe.curves import Curve, draw_curves
from megatron_gspo.observe.metrics_log import METRICS_FILE, read_metrics
from megatron_gspo.observe.summary import WINDOW, Row

REPORT_FILE = "report.md"
CURVES_FILE = "curves.svg"

# What a reader asks first of runs that have it in common.
FACTS = (
    "policy.hf",
    "data.source",
    "run.seed",
    "batch.prompts",
    "batch.samples",
    "batch.mini_batches",
    "policy.optimizer.lr",
)
NO_DIFFERENCE = ("run.dir", "run.steps")  # the page names runs and their steps itself
ROWS = (
    Row("reward", "reward/mean"),
    Row("exact match", "reward/exact"),
    Row("clip fraction (of tokens)", "objective/clip_fraction", ".4f"),
    Row("ratio of sequences, 1 % quantile", "objective/ratio/p01", ".4f"),
    Row("ratio of sequences, 99 % quantile", "objective/ratio/p99", ".4f"),
    Row("log-ratio of tokens, 1 % quantile", "objective/token_log_ratio_p01", ".4f"),
    Row("log-ratio of tokens, 99 % quantile", "objective/token_log_ratio_p99", ".4f"),
    Row("log-ratio of tokens, smallest", "objective/token_log_ratio_min", ".2f", min),
    Row("log-ratio of tokens, largest", "objective/token_log_ratio_max", ".2f", max),
    Row("tokens with another expert somewhere", "policy/routing_changed_tokens"),
    Row("expert choices that changed", "policy/routing_changed"),
    Row("entropy (nats)", "policy/entropy"),
    Row("gradient norm", "policy/grad_norm"),
    Row("response length (tokens)", "response/length", ".1f"),
    Row("loss", "objective/loss", ".4f"),
)
CURVES = (
    Curve("reward", "reward/mean"),
    Curve("exact match", "reward/exact"),
    Curve("clip fraction (log)", "objective/clip_fraction", log=True),
    Curve("ratio of sequences, 1 % to 99 %", "objective/ratio/p01", "objective/ratio/p99"),
    Curve("log-ratio of tokens, extremes", "objective/token_log_ratio_min", "objective/token_log_ratio_max"),
    Curve("tokens with another expert somewhere", "policy/routing_changed_tokens"),
    Curve("entropy (nats)", "policy/entropy"),
    Curve("response length (tokens)", "response/length"),
    Curve("loss", "objective/loss"),
)
NOTES = f"""\
Each cell is start → end: means over the first and the last {WINDOW:.0%} of that run's steps ("smallest" and "largest":
the extreme among them). In the curves, thin lines are steps and thick ones running means over as many.

Clipping and ratios are over all mini-batches of a step, the first of which is on-policy: its ratios are 1. The ratio of
a sequence is exp of its tokens' mean log-ratio, whatever the objective uses. Changes of experts are new against old
policy in the mini-batches after the first, over the tokens that train; `observe.routing_changes` records them.
"""


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it: its effective recipe by dotted key, and one record a step, at least one."""

    directory: Path
    recipe: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]


def read_run(directory: str | Path) -> RunRecord:
    """A run's folder, also of an unfinished run. Raises ValueError where it holds no run, or no step of one yet."""
    directory = Path(directory)
    path = directory / RECIPE_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: expected the folder of a run (run.dir of its recipe), but there is no {path}")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}; restore what `train` wrote") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: expected the sections of a recipe, got {type(recipe).__name__}")
    records = read_metrics(directory)
    if not records:
        raise ValueError(f"{directory}: no step is recorded in {METRICS_FILE} yet; report on it after its first step")
    return RunRecord(directory, dict(_leaves(recipe)), records)


def read_runs(directories: Sequence[str | Path]) -> dict[str, RunRecord]:
    """The runs by name, the shortest ends of their paths that tell all of them apart. Raises ValueError as `read_run`,
    and for a folder that is given twice."""
    parts = [Path(directory).resolve().parts for directory in directories]
    twice = [str(directory) for directory, path in zip(directories, parts, strict=True) if parts.count(path) > 1]
    if twice:
        raise ValueError(f"{twice[0]}: given twice; name each run once")
    length = 1
    while len({path[-length:] for path in parts}) < len(parts):
        length += 1
    return {"/".join(path[-length:]): read_run(directory) for path, directory in zip(parts, directories, strict=True)}


def write_report(runs: Mapping[str, RunRecord], out: str | Path) -> Path:
    """Write report.md and the curves that it shows into folder `out`, over an earlier report; returns its path."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    draw_curves(CURVES, {name: run.records for name, run in runs.items()}, WINDOW, out / CURVES_FILE)
    path = out / REPORT_FILE
    path.write_text(report_text(runs), encoding="utf-8")
    return path


def report_text(runs: Mapping[str, RunRecord]) -> str:
    """The page, in Markdown."""
    names, records = list(runs), list(runs.values())
    recipes = [run.recipe for run in records]
    facts = ", ".join(f"`{key}: {_show(value)}`" for key, value in shared_facts(recipes).items())
    what = {"steps": [_steps(run) for run in records]} | differences(recipes)
    parts = [f"# {' · '.join(names)}", _table(names, what)]
    if facts:
        parts.append(f"{'The same in all' if len(runs) > 1 else 'Further'}: {facts}.")
    cells = {row.label: [_start_and_end(row, run.records) for run in records] for row in ROWS}
    known = {label: line for label, line in cells.items() if any(line)}
    return "\n\n".join([*parts, _table(names, known), f"![curves]({CURVES_FILE})", NOTES])


def shared_facts(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Those of FACTS in which all recipes agree."""
    first, *others = recipes
    return {
        key: first[key] for key in FACTS if key in first and all(recipe.get(key) == first[key] for recipe in others)
    }


def differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Key -> its value in each recipe, of every key in which they differ; of a single recipe, the objective's keys.

    A key that a recipe does not have is "–". A section that one recipe is without is told as a whole.
    """
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key not in NO_DIFFERENCE]
    if len(recipes) == 1:
        return {f"`{key}`": [_show(recipes[0][key])] for key in keys if key.startswith("objective.")}
    absent = {key for key in keys if "." not in key}
    told = {}
    for key in keys:
        missing = "set" if key in absent else "–"
        values = [_show(recipe[key]) if key in recipe else missing for recipe in recipes]
        if len(set(values)) > 1 and key.partition(".")[0] not in absent - {key}:
            told[f"`{key}`"] = values
    return told


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _steps(run: RunRecord) -> str:
    done, planned = run.records[-1]["step"] + 1, run.recipe.get("run.steps")
    return f"{done}" if planned == done else f"{done} of {planned}"


def _start_and_end(row: Row, records: Sequence[Mapping[str, Any]]) -> str:
    window = max(1, round(WINDOW * len(records)))
    ends = [
        [record[row.metric] for record in part if record.get(row.metric) is not None]
        for part in (records[:window], records[-window:])
    ]
    if not any(ends):
        return ""
    return " → ".join(format(row.over(values), row.form) if values else "–" for values in ends)


def _show(value: Any) -> str:
    """As the recipe has it in YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1_000_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _table(names: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    rows = [" | ".join([label, *(text.replace("|", "\\|") for text in cells)]) for label, cells in lines.items()]
    head = [" | ".join(["", *names]), " | ".join(["---"] * (len(names) + 1))]
    return "\n".join(f"| {row} |" for row in [*head, *rows])
