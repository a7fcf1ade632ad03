"""The command line. Nothing heavy is imported before a command needs it, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

EXAMPLES = """\
examples:
  megatron-gspo train recipes/demo_sort.yaml
  megatron-gspo train recipes/demo_sort.yaml objective.clip_high=4e-4 run.dir=runs/wide
  megatron-gspo train recipes/demo_sort.yaml --resume
  megatron-gspo show recipes/demo_sort.yaml batch.mini_batches=4
  megatron-gspo show --keys policy.optimizer
  megatron-gspo report runs/compare/gspo runs/compare/grpo --out runs/compare/report
"""
TRAIN = """\
Run a recipe to its end. Under srun or torchrun this process joins as one rank; otherwise
run.workers ranks are started on this machine.

Any key can be overridden by its dotted name, the value written as YAML:
  objective.clip_high=4e-4          a number
  policy.layout.ep=2                one key of a nested section
  rollout.urls=[http://node7:30000] a list
  policy.megatron.recompute_granularity=selective
                                    any field of Megatron's TransformerConfig
A recipe may extend another one with `base: other.yaml`; its own keys win.
"""
SHOW = """\
Print the effective configuration of a recipe (bases and overrides merged, every default spelled
out) and its objective as a formula with its numbers in it. The output is itself a recipe:
  megatron-gspo show recipes/demo_sort.yaml > full.yaml
It refuses what `train` refuses, but only mentions what may be otherwise on the machine that trains.

With --keys, print the documentation of every key that a recipe may set, or of one section:
  megatron-gspo show --keys
  megatron-gspo show --keys rollout.sync
"""
REPORT = """\
Write one page on a run, or on several side by side: what differs between their recipes, where
each began and ended, and curves of reward, clipping, ratios, experts and entropy. It needs only
run folders (run.dir of a recipe), those of unfinished runs included:
  megatron-gspo report runs/demo_sort
  megatron-gspo report runs/compare/gspo runs/compare/grpo runs/compare/sapo --out runs/compare/report
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A recipe that is refused prints its problems and returns 2."""
    parser = _parser()
    # Overrides and run folders may stand on both sides of an option, which argparse alone does not accept.
    args, extra = parser.parse_known_args(argv)
    unknown = [word for word in extra if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {' '.join(unknown)}; see megatron-gspo {args.command} --help")
    words = "runs" if args.command == "report" else "overrides"
    setattr(args, words, [*getattr(args, words), *extra])
    if args.command == "show" and (args.recipe is None) == (args.keys is None):
        parser.error("show takes either a recipe or --keys [SECTION]")

    from megatron_gspo.config import RecipeError

    try:
        return args.run(args)
    except RecipeError as error:
        print(f"megatron-gspo: refused\n{error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="megatron-gspo",
        description="Reinforcement learning of large mixture-of-experts policies on Megatron-Core.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,show,report}")

    train = commands.add_parser("train", help="run a recipe", description=TRAIN, formatter_class=raw)
    train.add_argument("recipe", metavar="RECIPE", help="a YAML recipe")
    train.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="keys that differ from the recipe")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in run.dir")
    train.set_defaults(run=_train)

    show = commands.add_parser("show", help="print what a recipe means", description=SHOW, formatter_class=raw)
    show.add_argument("recipe", metavar="RECIPE", nargs="?", help="a YAML recipe")
    show.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="keys that differ from the recipe")
    show.add_argument("--keys", metavar="SECTION", nargs="?", const="", help="document all keys, or those of a section")
    show.set_defaults(run=_show)

    report = commands.add_parser("report", help="compare runs on one page", description=REPORT, formatter_class=raw)
    report.add_argument("runs", metavar="RUN_DIR", nargs="+", help="a run's folder")
    report.add_argument(
        "--out",
        metavar="DIR",
        help="where report.md and curves.svg go (default: report/ beside the first run's folder)",
    )
    report.set_defaults(run=_report)
    return parser


def _train(args: argparse.Namespace) -> int:
    from megatron_gspo.config import load_recipe
    from megatron_gspo.loop import launch

    return launch.main(load_recipe(args.recipe, args.overrides), args.resume)


def _show(args: argparse.Namespace) -> int:
    if args.keys is not None:
        from megatron_gspo.config.document import document_keys

        return _print(document_keys(args.keys))
    from megatron_gspo.config import effective_yaml, load_recipe, objective_formula
    from megatron_gspo.loop.check import check_shown

    recipe = load_recipe(args.recipe, args.overrides)
    for unseen in check_shown(recipe):
        print(f"megatron-gspo: not settled here: {unseen.describe(recipe.sources)}", file=sys.stderr)
    formula = "\n".join(f"# {line}".rstrip() for line in objective_formula(recipe).splitlines())
    return _print(f"{formula}\n\n{effective_yaml(recipe)}")


def _report(args: argparse.Namespace) -> int:
    from megatron_gspo.observe.report import read_runs, write_report

    try:
        runs = read_runs(args.runs)
    except ValueError as error:
        print(f"megatron-gspo: refused\n{error}", file=sys.stderr)
        return 2
    out = args.out or next(iter(runs.values())).directory.resolve().parent / "report"
    return _print(f"{write_report(runs, out)}\n")


def _print(text: str) -> int:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`; Python's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
