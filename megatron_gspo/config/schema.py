"""What a recipe may say. Frozen dataclasses, one per section; `load.py` fills them, `validate.py` checks them.

Neither torch nor Megatron is imported here, so that a recipe can be checked on a login node in no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatron_gspo.config.advantage import AdvantageConfig
from megatron_gspo.config.correction import CorrectionConfig
from megatron_gspo.config.key import key
from megatron_gspo.config.objectives import ObjectiveConfig
from megatron_gspo.config.source import Sources, nearest


class Dtype(StrEnum):
    """Parameter and activation dtype of the policy; master weights, gradients and logprobs are fp32 in both."""

    bf16 = "bf16"
    fp32 = "fp32"


class Mtp(StrEnum):
    """Multi-token-prediction layers of the checkpoint (DeepSeek-V3, GLM-4.5): `carry` builds none and hands their
    tensors on bit for bit; `train` lets them learn the policy's responses, and never moves the policy by it."""

    carry = "carry"
    train = "train"


class Schedule(StrEnum):
    """Learning-rate decay after the warm-up (Megatron's OptimizerParamScheduler)."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Engine(StrEnum):
    """Who starts the SGLang servers: the recipe (`managed`) or somebody else (`external`, named by URL)."""

    managed = "managed"
    external = "external"


class Transport(StrEnum):
    """How new weights reach the servers: buckets over a process group, or an HF checkpoint on a shared disk."""

    distributed = "distributed"
    disk = "disk"


class OnRewardError(StrEnum):
    """What an exception or a timeout in a reward does: score 0 and count it, or stop the run."""

    zero = "zero"
    stop = "stop"


class OnNonFinite(StrEnum):
    """What a non-finite loss or gradient does: stop before the optimizer step, or skip that step and count it."""

    stop = "stop"
    skip = "skip"


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Layout of the policy. DP is what remains: world / (tp x pp x cp). tp > 1 turns sequence parallelism on."""

    tp: int = key("tensor-parallel size", 1, ge=1)
    pp: int = key("pipeline-parallel size (stages)", 1, ge=1)
    vpp: int = key("virtual pipeline stages per rank; 1 is the plain 1F1B schedule", 1, ge=1)
    cp: int = key("context-parallel size; every sequence is cut into 2 x cp zigzag chunks", 1, ge=1)
    ep: int = key("expert-parallel size; spans dp x cp x tp ranks and must divide the number of experts", 1, ge=1)
    etp: int = key("tensor-parallel size inside one expert", 1, ge=1)
    pipeline_layout: str | None = key(
        "Megatron's pipeline_model_parallel_layout for uneven stages, e.g. 'Et*3|t*4|t*3L'; null cuts evenly", None
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW on Megatron's (distributed) optimizer and its learning-rate schedule, in optimizer steps."""

    lr: float = key("peak learning rate", gt=0)
    min_lr: float = key("learning rate at the end of the decay", 0.0, ge=0)
    schedule: Schedule = key("decay after the warm-up", Schedule.constant)
    warmup_steps: int = key("optimizer steps of linear warm-up from 0", 0, ge=0)
    decay_steps: int | None = key(
        "optimizer steps until min_lr; null is run.steps x batch.mini_batches. Unused by the constant schedule",
        None,
        gt=0,
    )
    weight_decay: float = key("AdamW weight decay; norms and biases are excluded", 0.0, ge=0)
    beta1: float = key("AdamW beta1", 0.9, ge=0, lt=1)
    beta2: float = key("AdamW beta2", 0.95, ge=0, lt=1)
    eps: float = key("AdamW epsilon", 1e-8, gt=0)
    clip_grad: float = key("global gradient-norm clip; 0 disables", 1.0, ge=0)
    distributed: bool = key("shard optimizer state and master weights over DP (Megatron's distributed optimizer)", True)
    megatron: dict[str, Any] = key("any other field of Megatron's OptimizerConfig", factory=dict)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The trained model: an HF checkpoint on a Megatron layout."""

    hf: str = key("directory of the HF checkpoint that training starts from (config, tokenizer, safetensors)")
    dtype: Dtype = key("parameter and activation dtype", Dtype.bf16)
    layout: LayoutConfig = key("parallel layout", factory=LayoutConfig)
    mtp: Mtp = key(
        "multi-token-prediction layers of the checkpoint: left as they are, or trained on the response tokens beside "
        "the policy; policy.megatron.mtp_loss_scaling_factor (0.1) weighs their loss",
        Mtp.carry,
    )
    optimizer: OptimizerSection = key("optimizer and learning-rate schedule", factory=OptimizerSection)
    megatron: dict[str, Any] = key("any field of Megatron's TransformerConfig that is not derived", factory=dict)
    ddp: dict[str, Any] = key("any field of Megatron's DistributedDataParallelConfig that is not derived", factory=dict)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of GAE: a model of the policy's layout and precision with one output per token."""

    hf: str | None = key("directory of the HF checkpoint that its body starts from; null is policy.hf", None)
    lr: float | None = key(
        "peak learning rate; null is that of the policy, whose optimizer it shares otherwise", None, gt=0
    )
    clip: float | None = key(
        "values move at most this far from the old ones, in the loss (PPO: 0.2); null does not clip", 0.2, gt=0
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One RL step's batch and how it is cut."""

    prompts: int = key("prompts per step", ge=1)
    samples: int = key("responses per prompt (the group of group-relative advantages)", 1, ge=1)
    mini_batches: int = key("optimizer steps per batch; must divide prompts", 1, ge=1)
    max_tokens: int = key("tokens per micro-batch and DP rank, padding included; bounds activation memory", 8192, ge=1)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A managed SGLang server."""

    tp: int = key("tensor-parallel size of the server", 1, ge=1)
    port: int = key("HTTP port; 0 picks a free one", 0, ge=0, le=65535)
    start_timeout_s: float = key("seconds from start to healthy", 300.0, gt=0)
    args: dict[str, Any] = key(
        "further sglang.launch_server flags without the dashes, e.g. {mem_fraction_static: 0.8}; true is a bare flag",
        factory=dict,
    )


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weight updates from the trainer into the servers."""

    transport: Transport = key("how weights travel", Transport.distributed)
    bucket_mb: int = key("size of one flattened bucket in MiB (transport: distributed)", 512, ge=1)
    probe_tolerance: float | None = key(
        "largest |logp_trainer - logp_server| on the probe sequence after an update; beyond it the run stops. "
        "null is 1e-3 for policy.dtype fp32 and 0.1 for bf16, whose engines round differently",
        None,
        gt=0,
    )
    timeout_s: float = key("seconds that one request of a weight update may take", 600.0, gt=0)


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups with equal rewards, which teach nothing, are sampled anew."""

    max_attempts: int = key(
        "prompts tried for one place of the batch; the last group stays, whatever its rewards", 10, gt=1
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling from SGLang."""

    engine: Engine = key("who starts the servers", Engine.managed)
    urls: list[str] = key("server URLs, each http://HOST:PORT (engine: external)", factory=list)
    server: ServerConfig = key("the server to start (engine: managed)", factory=ServerConfig)
    sync: SyncConfig = key("weight updates", factory=SyncConfig)
    temperature: float = key("sampling temperature; the trainer scores at the same temperature", 1.0, gt=0)
    top_p: float = key("nucleus sampling; ratios are only exact at 1", 1.0, gt=0, le=1)
    top_k: int = key("top-k sampling; -1 is off, ratios are only exact then", -1, ge=-1)
    max_new_tokens: int = key("longest response in tokens", ge=1)
    train_cut_short: bool = key(
        "train on responses that max_new_tokens cut short; false masks them (overlong filtering of DAPO)", True
    )
    dynamic_sampling: DynamicSamplingConfig | None = key("sample groups with equal rewards anew", None)
    max_concurrency: int = key("requests in flight over all servers", 256, ge=1)
    request_timeout_s: float = key("seconds that one generate request may take, retries excluded", 3600.0, gt=0)
    retries: int = key("attempts after a failed generate request", 3, ge=0)
    replay: str | None = key(
        "directory of recorded batches to train from instead of sampling; no server, data or reward is used then, and "
        "the run names the keys that this leaves without effect",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Soft punishment of long responses (DAPO, arXiv 2503.14476, equation 13), added to the reward."""

    buffer: int = key("last tokens of rollout.max_new_tokens, over which the punishment grows from 0 to -weight", gt=0)
    weight: float = key("punishment of a response as long as rollout.max_new_tokens", 1.0, gt=0)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a response is worth."""

    name: str = key("a registered reward, or a function of your own as 'module:function'")
    args: dict[str, Any] = key("keyword arguments given to the reward", factory=dict)
    overlong: OverlongConfig | None = key("soft punishment of long responses", None)
    concurrency: int = key("rewards computed at once", 64, ge=1)
    timeout_s: float = key(
        "seconds that one reward may take; past them it counts as an error (a plain function's thread runs on)",
        600.0,
        gt=0,
    )
    on_error: OnRewardError = key("what an exception in the reward, or its timeout, does", OnRewardError.zero)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts (and, for sft, responses) come from."""

    source: str = key(
        "'jsonl', 'parquet', or a task generator: 'sort_digits', or 'reasoning_gym:DATASET' for any of its data sets"
    )
    path: str | None = key("file of the jsonl and parquet sources", None)
    prompt_key: str = key("field that holds the prompt (a string, or chat messages)", "prompt")
    response_key: str = key("field that holds the response (objective sft)", "response")
    max_prompt_tokens: int = key(
        "a longer prompt is never cut: another takes its place, and data/dropped_prompts counts it", 4096, ge=1
    )
    shuffle: bool = key("shuffle each epoch with the run's seed (jsonl and parquet)", True)
    args: dict[str, Any] = key("keyword arguments of the task generator", factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: its folder, its length, its checkpoints."""

    dir: str = key("run folder; holds metrics, logs, rollouts, checkpoints and the effective configuration")
    steps: int = key("RL steps (batches)", ge=1)
    seed: int = key("seed of data order, task generators and initialisation", 0, ge=0)
    workers: int = key(
        "trainer ranks that `train` starts on this machine when neither srun nor torchrun did", 1, ge=1, le=4096
    )
    threads: int = key("CPU threads per trainer rank", 1, ge=1, le=4096)
    save_every: int = key("steps between checkpoints; 0 saves only at the end", 0, ge=0)
    keep_checkpoints: int = key("newest checkpoints kept; 0 keeps all", 2, ge=0)
    export_hf: bool = key("write the trained policy as an HF checkpoint to DIR/hf at the end", True)
    grace_s: float = key(
        "seconds after SIGTERM or SIGUSR1 in which the step may finish; past it, the step stops at its next mini-batch",
        300.0,
        ge=0,
    )
    on_non_finite: OnNonFinite = key("what a non-finite loss or gradient does", OnNonFinite.stop)
    timeout_s: float = key(
        "seconds after which a collective that some rank did not join fails; ranks that wait for a batch, a server or "
        "its weights say so to each other every 10 s",
        1800.0,
        ge=30,
    )


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    project: str = key("W&B project")
    entity: str | None = key("W&B entity", None)
    name: str | None = key("W&B run name; null is the name of the run folder", None)


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What is measured beyond the usual, and where it goes besides metrics.jsonl and TensorBoard."""

    routing_changes: bool = key(
        "measure how many tokens have other experts than under the old policy, after a step's first mini-batch; costs "
        "experts / 8 bytes per token and layer",
        False,
    )
    wandb: WandbConfig | None = key("log to Weights & Biases", None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe. `sources` says where each key was set; it is no key and takes no part in comparisons."""

    run: RunConfig = key("the run", factory=RunConfig)
    policy: PolicyConfig = key("the trained model", factory=PolicyConfig)
    objective: ObjectiveConfig = key("the objective; its class follows objective.name", factory=ObjectiveConfig)
    advantage: AdvantageConfig | None = key("advantage estimator; none for sft", None)
    correction: CorrectionConfig | None = key("correction of the gap between rollout engine and trainer", None)
    critic: CriticConfig | None = key("value model; for the advantage estimator gae", None)
    batch: BatchConfig = key("batch size and cuts", factory=BatchConfig)
    data: DataConfig = key("prompts", factory=DataConfig)
    rollout: RolloutConfig | None = key("sampling; none for sft", None)
    reward: RewardConfig | None = key("reward; none for sft", None)
    observe: ObserveConfig = key("metrics sinks", factory=ObserveConfig)
    sources: Sources = field(default_factory=dict, repr=False, compare=False, metadata={"omegaconf_ignore": True})

    def where(self, path: str) -> str:
        """The place that set the dotted key `path` or the section around it, e.g. `demo.yaml:12` or `command line`."""
        return str(nearest(self.sources, path) or "default")
