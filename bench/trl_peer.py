"""TRL's GRPOTrainer configured as GSPO, timed by phase; a process of its own, started by rl_step.py.

    python -m bench.trl_peer JOB.json

The job (see `Job`) comes as JSON; what was measured goes to its `result` as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_gspo.batch.record import read_index, read_rows
from megatron_gspo.loop.source import record_path


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the trainer.

    policy: HF checkpoint. dtype fp32. prompts, samples: per RL step. mini_batches: optimizer steps per RL step.
    rows: responses per forward pass. records: folder of recorded batches, or None to generate in the process from
    `texts` (prompts of all steps, one after the other) up to max_new_tokens each.
    """

    policy: str
    output: str
    steps: int
    prompts: int
    samples: int
    mini_batches: int
    rows: int
    threads: int
    lr: float
    clip_low: float
    clip_high: float
    max_new_tokens: int
    texts: list[str]
    records: str | None
    result: str


class TimedTrainer(GRPOTrainer):
    """Counts the seconds of generation, of scoring and of all that prepares a batch; changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.seconds = {"rollout": 0.0, "score": 0.0, "prepare": 0.0}
        self.mean_nll: list[float] = []  # of each batch, under the policy that is about to be trained
        self.response_tokens: list[int] = []  # of each batch
        super().__init__(*args, **kwargs)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def _generate(self, prompts: list) -> Any:
        with self._span("rollout"):
            return super()._generate(prompts)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self._span("score"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].bool()
        self.mean_nll.append(-float(output["old_per_token_logps"][mask].double().mean()))
        self.response_tokens.append(int(mask.sum()))
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self._span("prepare"):
            return super()._prepare_inputs(generation_batch)


class StepClock(TrainerCallback):
    """Closes the books of an RL step at its last optimizer step."""

    def __init__(self, mini_batches: int):
        self.mini_batches = mini_batches
        self.steps: list[dict[str, float]] = []
        self.trainer: TimedTrainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.mini_batches:
            return
        now = time.perf_counter()
        taken = self.trainer.seconds
        self.steps.append(
            {
                "rollout": taken["rollout"],
                "pack": taken["prepare"] - taken["rollout"] - taken["score"],
                "score": taken["score"],
                "update": now - self._since - taken["prepare"],
                "step": now - self._since,
            }
        )
        self.trainer.seconds = dict.fromkeys(taken, 0.0)
        self._since = now


class Replay:
    """A `rollout_func` that returns the recorded batches, one a call."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._step = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list | None]:
        record = record_path(self._directory, self._step)
        self._step += 1
        index = read_index(record)
        tokens = read_rows(record, range(index.n)).tokens.split(index.lens.tolist())
        cut = index.prompt_lens.tolist()
        return {
            "prompt_ids": [row[:k].tolist() for row, k in zip(tokens, cut, strict=True)],
            "completion_ids": [row[k:].tolist() for row, k in zip(tokens, cut, strict=True)],
            "logprobs": None,
            "given_reward": index.rewards.tolist(),
        }


def given_reward(completions: list[str], given_reward: list[float], **_: Any) -> list[float]:
    """The recorded reward of each response."""
    return given_reward


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward as cheap as the demo's: the share of characters that are digits."""
    return [sum(char.isdigit() for char in text) / max(len(text), 1) for text in completions]


def config_of(job: Job) -> GRPOConfig:
    """GSPO (arXiv 2507.18071) in TRL's terms, with the optimizer of our recipe."""
    accumulation = job.prompts * job.samples // job.mini_batches // job.rows
    return GRPOConfig(
        output_dir=job.output,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=job.clip_low,
        epsilon_high=job.clip_high,
        beta=0.0,
        scale_rewards="group",
        num_generations=job.samples,
        max_completion_length=job.max_new_tokens,
        temperature=1.0,
        top_k=0,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * job.mini_batches,
        max_steps=job.steps * job.mini_batches,
        shuffle_dataset=False,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run(job: Job) -> dict[str, Any]:
    """Train; returns the seconds by phase and the response tokens of every step, and the mean -logp of its batch."""
    torch.set_num_threads(job.threads)
    clock = StepClock(job.mini_batches)
    trainer = TimedTrainer(
        model=job.policy,
        reward_funcs=given_reward if job.records else share_of_digits,
        args=config_of(job),
        train_dataset=Dataset.from_dict({"prompt": job.texts}),
        callbacks=[clock],
        rollout_func=Replay(Path(job.records)) if job.records else None,
    )
    clock.trainer = trainer
    trainer.train()
    return {"steps": clock.steps, "mean_nll": trainer.mean_nll, "response_tokens": trainer.response_tokens}


if __name__ == "__main__":
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.result).write_text(json.dumps(run(job)))
