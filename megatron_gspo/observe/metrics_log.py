"""Metrics of every step: metrics.jsonl and TensorBoard in the run folder, Weights & Biases if configured."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_gspo.config.schema import ObserveConfig, WandbConfig

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
WANDB_ID_FILE = "wandb_id"  # lets a resumed run go on with its W&B run


class MetricsLog:
    """Writes one record a step. `first_step` is the step that comes first: records from it on, left by a run that went
    further than the checkpoint it now resumes from, are removed, so that no step appears twice."""

    def __init__(self, run_dir: str | Path, config: ObserveConfig, first_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        _keep_before(directory, first_step)
        self._file = (directory / METRICS_FILE).open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(directory / TENSORBOARD_DIR), purge_step=first_step)
        self._wandb = _start_wandb(directory, config.wandb) if config.wandb else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`; on disk when it returns. A value that is not finite is null in metrics.jsonl."""
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log({"step": step, **values})

    def close(self) -> None:
        """Flush and close every sink."""
        self._file.close()
        self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl in order; none if there is no file. Raises ValueError for a line that is no record,
    except a last one without its newline, which a killed run leaves."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}; remove the line") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path}:{number}: expected an object with a 'step', got {line!r:.80}; remove the line")
        records.append(record)
    return records


def _keep_before(directory: Path, first_step: int) -> None:
    lines = [json.dumps(record) + "\n" for record in read_metrics(directory) if record["step"] < first_step]
    staging = directory / f".{METRICS_FILE}.new"
    staging.write_text("".join(lines), encoding="utf-8")
    os.replace(staging, directory / METRICS_FILE)


def _start_wandb(directory: Path, config: WandbConfig) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ValueError("observe.wandb is set, but wandb is missing: pip install 'megatron-gspo[wandb]'") from None
    id_file = directory / WANDB_ID_FILE
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex)
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        name=config.name or directory.resolve().name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(directory),
    )
    # W&B's own step only grows; a resumed run may repeat steps, so ours is a metric and the axis of all others.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
