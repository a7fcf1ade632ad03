"""Collects what a step tells, reduces it over the ranks, and hands it to the sinks on rank 0."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_gspo.batch.trajectory import Finish, TrajectoryIndex
from megatron_gspo.config import Recipe
from megatron_gspo.loop.cut import Cut
from megatron_gspo.loop.state import RunState
from megatron_gspo.objective import Metric, merge, reduce_metrics, zero_variance_share
from megatron_gspo.observe import MetricsLog, Phases, Progress, summary_table
from megatron_gspo.policy.layout import Layout

# Metrics of the policy rather than of its objective, by the names that diagnostics give them.
_POLICY = {
    "entropy": "entropy",
    "rollout_gap": "logp_diff",
    "rollout_gap_max": "logp_diff_max",
    "mtp_nll": "mtp_nll",
}


class StepReport:
    """The report of one run on one rank; only rank 0 (`is_main`) writes. Construct on every rank."""

    def __init__(self, recipe: Recipe, *, is_main: bool):
        self._recipe = recipe
        self._is_main = is_main
        self._phases = Phases()
        self._parts: dict[str, list[dict[str, Metric]]] = {}
        self._scalars: dict[str, float] = {}
        self._updates: dict[str, list[tuple[float, float, bool]]] = {}
        self._log: MetricsLog | None = None
        self._progress: Progress | None = None

    def start(self, state: RunState) -> None:
        """Open the sinks at the step that comes first."""
        if self._is_main:
            self._log = MetricsLog(self._recipe.run.dir, self._recipe.observe, state.step)
            self._progress = Progress(self._recipe.run.steps, state.step)

    def begin(self) -> None:
        """The first step begins now: forget the seconds of starting."""
        self._phases.take()

    def say(self, text: str) -> None:
        """A line to the person who watches."""
        if self._is_main:
            print(f"[{Path(self._recipe.run.dir).name}] {text}", flush=True)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds of a phase."""
        return self._phases.span(name)

    def sampling(self, done: int, total: int) -> None:
        """Progress inside the rollout phase."""
        if self._progress:
            self._progress.activity(f"sampled {done} of {total}")

    def scalar(self, name: str, value: float) -> None:
        """A number of this step that rank 0 knows already."""
        self._scalars[name] = value

    def add(self, model: str, parts: Sequence[dict[str, Metric]], grad_norm: float, lr: float, applied: bool) -> None:
        """What one optimizer step of `model` (policy or critic) reports: metrics of this rank's micro-batches (last
        stage only), and scalars."""
        self._parts.setdefault(model, []).extend(parts)
        self._updates.setdefault(model, []).append((grad_norm, lr, applied))

    def finish(self, step: int, weight_version: int, index: TrajectoryIndex, cuts: Sequence[Cut], layout: Layout):
        """Reduce and write the report of `step`. Collective over all ranks."""
        metrics = self._reduced(layout)
        if self._log and self._progress:
            seconds = self._phases.take()
            tokens = sum(cut.num_tokens for cut in cuts)
            metrics |= _batch_metrics(index, has_rewards=self._recipe.reward is not None)
            metrics |= self._scalars | seconds
            for model, updates in self._updates.items():
                metrics |= _update_metrics(model, updates)
            metrics |= {
                "perf/tokens_per_s": tokens / (seconds["time/step"] - seconds.get("time/save", 0.0)),
                "perf/padding": _padding_share(cuts, tokens, layout.dp),
                "perf/peak_memory_gb": _peak_memory_gb(),
                "run/weight_version": float(weight_version),
            }
            self._log.log(step, metrics)
            self._progress.update(step, metrics)
        self._parts, self._scalars, self._updates = {}, {}, {}

    def summary(self) -> None:
        """Print the table of the run on rank 0."""
        if self._is_main:
            self.close()
            print("\n" + summary_table(self._recipe.run.dir), flush=True)

    def close(self) -> None:
        """Close the sinks; harmless when there are none."""
        if self._log and self._progress:
            self._progress.close()
            self._log.close()
        self._log = self._progress = None

    def _reduced(self, layout: Layout) -> dict[str, float]:
        box: list[dict[str, float]] = [{}]
        if layout.is_last_stage:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            metrics = {
                _name(model, name): m for model, parts in self._parts.items() for name, m in merge(parts).items()
            }
            box[0] = reduce_metrics(metrics, dp_cp_group=layout.pgs.dp_cp, dp_group=layout.pgs.dp, device=device)
            # Shares of a loss add up to one mini-batch's loss; report the mean over the step's mini-batches.
            for model, updates in self._updates.items():
                box[0][_name(model, "loss")] /= len(updates)
        dist.broadcast_object_list(box, layout.last_stage_rank, group=layout.pgs.pp)
        return box[0]


def _name(model: str, name: str) -> str:
    if model == "policy":
        return f"policy/{_POLICY[name]}" if name in _POLICY else f"objective/{name}"
    return f"{model}/{name}"


def _update_metrics(model: str, updates: Sequence[tuple[float, float, bool]]) -> dict[str, float]:
    norms, lrs, applied = zip(*updates, strict=True)
    return {
        f"{model}/grad_norm": sum(norms) / len(norms),
        f"{model}/lr": lrs[-1],
        f"{model}/updates": float(len(applied)),
        f"{model}/skipped_updates": float(len(applied) - sum(applied)),
    }


def _batch_metrics(index: TrajectoryIndex, *, has_rewards: bool) -> dict[str, float]:
    metrics = {
        "response/length": float(index.response_lens.double().mean()),
        "response/length_max": float(index.response_lens.max()),
        "response/cut_short": float((index.finish == Finish.length).double().mean()),
    }
    if has_rewards:
        metrics |= {
            "reward/mean": float(index.rewards.mean()),
            "reward/std": float(index.rewards.std()),
            "reward/zero_variance_groups": zero_variance_share(index.rewards, index.group),
        }
        metrics |= {f"reward/{name}": float(values.nanmean()) for name, values in index.metrics.items()}
    return metrics


def _padding_share(cuts: Sequence[Cut], tokens: int, dp: int) -> float:
    return 1 - tokens / sum(cut.plan.padded_length * len(cut.micro_batches) * dp for cut in cuts)


def _peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
