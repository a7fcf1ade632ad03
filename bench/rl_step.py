"""One RL step of the demo on CPU against TRL's GRPOTrainer configured as GSPO: same model, same trajectories, same run.

    python -m bench.rl_step [--quick] [--steps N]        (TRL: pip install --group bench)

Both sides train recorded batches of fixed tokens (`bench/shapes.py`), two mini-batches a step, on the same number of
CPU threads in all; the mean -logp that each finds for the first batch must agree. Ours runs as `megatron-gspo train`
with `rollout.replay` and is read from its metrics.jsonl: two ranks of one thread with EP 2 (the demo), and one rank of
two threads. TRL is timed around its own methods (`bench/trl_peer.py`), at each of several numbers of rows per forward
pass; its fastest one counts. Tokens are those of prompts and responses, without padding. The first step of each run
is left out; numbers are medians over the others. Then, without --quick: the rollout through our client and through
SGLang's own on one server, and whole steps that sample for themselves, ours from SGLang, TRL's in its process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.ours import PHASES, Settings, phases, train
from bench.processes import run_watched
from bench.rollout import make_texts, serve, through_our_client, through_sglangs_client
from bench.shapes import PROMPT_TOKENS, RAGGED, SHORT, Shape, padding_share, write_records

say = partial(print, flush=True)  # a long run, often read through a pipe

THREADS = 2
CONCURRENCY = 256
MINI_BATCHES = 2
LR, CLIP_LOW, CLIP_HIGH = 3e-4, 3e-4, 4e-4
MAX_TOKENS = 4096  # the demo's
TRL_ROWS = {"short": (256, 64), "ragged": (16, 64)}
NLL_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side on one shape: seconds by phase and tokens (prompts and responses) of each step, without the first."""

    side: str
    steps: list[dict[str, float]]
    tokens: list[int]
    mean_nll: float  # of the first batch, under the initial policy
    peaks_gb: dict[str, float]  # peak memory by process; the first is that of the process (or rank) that trains
    responses: list[int]  # response tokens of each step

    @property
    def peak_gb(self) -> float:
        """Of the largest process that trains."""
        return next(iter(self.peaks_gb.values()))

    def seconds(self, phase: str) -> float:
        """Median over the steps."""
        return median(step.get(phase, 0.0) for step in self.steps)

    def tokens_per_s(self, phase: str) -> float:
        """Median over the steps."""
        return median(n / step[phase] for n, step in zip(self.tokens, self.steps, strict=True))


def measure_ours(work: Path, shape: Shape, steps: int, workers: int, records: Path | None) -> Measured:
    """`workers` ranks that share THREADS threads; sampled from a managed server without `records`."""
    settings = Settings(
        policy=work / "policy",
        steps=steps,
        mini_batches=MINI_BATCHES,
        lr=LR,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        workers=workers,
        threads=THREADS // workers,
        max_tokens=MAX_TOKENS,
    )
    run_dir = work / f"ours_{shape.name}_{workers}{'' if records else '_live'}"
    metrics, peaks = train(settings, shape, run_dir, records)
    responses = [round(step["response/length"] * shape.n) for step in metrics]
    return Measured(
        side=f"ours, {workers} x {THREADS // workers} threads",
        steps=phases(metrics)[1:],
        tokens=[n + PROMPT_TOKENS * shape.n for n in responses][1:],
        mean_nll=metrics[0]["policy/logp_diff"],
        peaks_gb={"rank": peaks.pop("megatron_gspo.loop"), **peaks},
        responses=responses[1:],
    )


def measure_trl(work: Path, shape: Shape, steps: int, rows: int, records: Path | None) -> Measured:
    """One process of THREADS threads; generates for itself without `records`."""
    name = f"trl_{shape.name}_{rows}{'' if records else '_live'}"
    result = work / f"{name}.result.json"
    job = {
        "policy": str(work / "policy"),
        "output": str(work / name),
        "steps": steps,
        "prompts": shape.prompts,
        "samples": shape.samples,
        "mini_batches": MINI_BATCHES,
        "rows": rows,
        "threads": THREADS,
        "lr": LR,
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "max_new_tokens": shape.longest,
        "texts": [text for step in range(steps) for text in make_texts(shape, seed=step)],
        "records": str(records) if records else None,
        "result": str(result),
    }
    path = work / f"{name}.json"
    path.write_text(json.dumps(job))
    peaks = run_watched([sys.executable, "-m", "bench.trl_peer", str(path)], work / f"{name}.log", threads=THREADS)
    found = json.loads(result.read_text())
    responses = found["response_tokens"]
    return Measured(
        side=f"TRL, 1 x {THREADS} threads, {rows} rows",
        steps=found["steps"][1:],
        tokens=[n + PROMPT_TOKENS * shape.n for n in responses][1:],
        mean_nll=found["mean_nll"][0],
        peaks_gb={"trainer": peaks.pop("bench.trl_peer")},
        responses=responses[1:],
    )


def compare_training(work: Path, shape: Shape, steps: int, *, quick: bool) -> None:
    """Score and update on the same recorded batches."""
    records = work / f"records_{shape.name}"
    write_records(records, shape, steps)
    ours = [measure_ours(work, shape, steps, workers, records) for workers in ((2,) if quick else (2, 1))]
    say(
        f"\n{shape.name}: {shape.n} responses of up to {shape.longest} tokens, {sum(ours[0].tokens):,} tokens in "
        f"{steps - 1} steps; padded to their longest, {padding_share(shape, steps):.0%} of the positions are empty"
    )
    say(f"  {'':32}{'score':>9}{'train':>9}   tokens/s {'pack':>6}{'score':>7}{'update':>8}{'sum':>7} s {'peak':>6} GB")
    for side in ours:
        _print_training(side)
    if importlib.util.find_spec("trl") is None:
        say("  TRL is not installed (pip install --group bench): no ratios")
        return
    theirs = [measure_trl(work, shape, steps, rows, records) for rows in TRL_ROWS[shape.name][: 1 if quick else None]]
    for side in theirs:
        _print_training(side)
    for side in (*ours, *theirs):
        if abs(side.mean_nll - ours[0].mean_nll) > NLL_TOLERANCE:
            raise RuntimeError(f"{side.side}: mean -logp of the first batch {side.mean_nll}, ours {ours[0].mean_nll}")
    best = max(theirs, key=lambda side: side.tokens_per_s("update"))
    score = max(side.tokens_per_s("score") for side in theirs)
    for side in ours:
        ratios = side.tokens_per_s("score") / score, side.tokens_per_s("update") / best.tokens_per_s("update")
        memory = f"{'':31}{side.peak_gb / best.peak_gb:>8.2f}x"
        say(f"  {side.side + ' / TRL':32}{ratios[0]:>8.2f}x{ratios[1]:>8.2f}x{memory}")
    say(f"  mean -logp of the first batch: {', '.join(f'{side.mean_nll:.6f}' for side in (*ours, *theirs))}")


def _print_training(side: Measured) -> None:
    pack, score, update = (side.seconds(phase) for phase in ("pack", "score", "update"))
    say(
        f"  {side.side:32}{side.tokens_per_s('score'):>9,.0f}{side.tokens_per_s('update'):>9,.0f}"
        f"{pack:>18.2f}{score:>7.2f}{update:>8.2f}{pack + score + update:>7.2f}{side.peak_gb:>9.2f}"
    )


def compare_rollout(work: Path, shapes: tuple[Shape, ...], rounds: int) -> None:
    """Our client and SGLang's own in turn, on one server; then ours as a run uses it, a request per group."""
    policy = work / "policy"
    longest = max(shape.longest for shape in shapes)
    say(f"\nrollout, response tokens/s of one server, {CONCURRENCY} requests in flight (best of {rounds} rounds)")
    with serve(policy, PROMPT_TOKENS + longest, work / "server.log") as url:
        for shape in shapes:
            ours, theirs, groups = [], [], []
            for _ in range(rounds):
                ours.append(through_our_client(url, policy, shape, CONCURRENCY, group=1).tokens_per_s)
                theirs.append(through_sglangs_client(url, policy, shape, CONCURRENCY, work).tokens_per_s)
                groups.append(through_our_client(url, policy, shape, CONCURRENCY, group=shape.samples).tokens_per_s)
            say(
                f"  {shape.name:8} our client {max(ours):,.0f}; sglang.benchmark.serving {max(theirs):,.0f}; ratio "
                f"{max(ours) / max(theirs):.2f}x; ours in groups of {shape.samples}: {max(groups):,.0f}"
            )


def compare_whole_steps(work: Path, shape: Shape, steps: int) -> None:
    """Steps that sample for themselves: ours from its server and with weight updates, TRL's by model.generate."""
    say(
        f"\nwhole steps, {shape.name}: {shape.n} responses of at most {shape.longest} tokens (a policy not yet trained)"
    )
    say(f"  {'seconds':32}" + "".join(f"{phase:>9}" for phase in PHASES) + f"{'response tokens/s':>20}")
    sides = [measure_ours(work, shape, steps, 2, None)]
    if importlib.util.find_spec("trl") is not None:
        sides.append(measure_trl(work, shape, steps, TRL_ROWS[shape.name][0], None))
    speeds = []
    for side in sides:
        speeds.append(median(n / step["step"] for n, step in zip(side.responses, side.steps, strict=True)))
        cells = "".join(f"{side.seconds(phase):>9.2f}" for phase in PHASES)
        say(f"  {side.side:32}{cells}{speeds[-1]:>20,.0f}")
        say(f"  {'peak GB by process':32}" + ", ".join(f"{name} {gb:.2f}" for name, gb in side.peaks_gb.items()))
    if len(speeds) == 2:
        say(f"  ours / TRL, response tokens/s of the whole step: {speeds[0] / speeds[1]:.2f}x")


def describe_machine() -> str:
    """Processor, cores, load and the versions that decide."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    packages = ("torch", "megatron-core", "transformers", "trl", "sglang")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in packages
        if importlib.util.find_spec(name.split("-")[0])
    )
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, {THREADS} threads a side, load average {load:.1f}\n{versions}"


def run(work: Path, steps: int, *, quick: bool) -> None:
    """Everything that the arguments ask for, in `work`, an empty folder."""
    command = [sys.executable, "tools/make_demo_policy.py", "--out", str(work / "policy")]
    subprocess.run(command, check=True, capture_output=True)
    say(describe_machine())
    for shape in (SHORT, RAGGED):
        compare_training(work, shape, steps, quick=quick)
    if not quick:
        compare_rollout(work, (SHORT, RAGGED), rounds=3)
        for shape in (SHORT, RAGGED):
            compare_whole_steps(work, shape, min(steps, 5))
    say(f"load average at the end {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="score and update only, two measured steps")
    parser.add_argument("--steps", type=int, default=9, help="steps per run, the first of which is left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        run(Path(work), 3 if arguments.quick else arguments.steps, quick=arguments.quick)


if __name__ == "__main__":
    main()
