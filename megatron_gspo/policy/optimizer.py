"""AdamW on Megatron's optimizer, and its learning-rate schedule, from the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from megatron_gspo.config.schema import Dtype, OptimizerSection, PolicyConfig, Recipe, Schedule
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.overrides import checked_overrides
from megatron_gspo.policy.transformer_config import TORCH_DTYPE

_DERIVED = {
    "lr": "set it through policy.optimizer.lr",
    "min_lr": "set it through policy.optimizer.min_lr",
    "weight_decay": "set it through policy.optimizer.weight_decay",
    "adam_beta1": "set it through policy.optimizer.beta1",
    "adam_beta2": "set it through policy.optimizer.beta2",
    "adam_eps": "set it through policy.optimizer.eps",
    "clip_grad": "set it through policy.optimizer.clip_grad",
    "use_distributed_optimizer": "set it through policy.optimizer.distributed",
    "overlap_param_gather": "set it through policy.ddp.overlap_param_gather",
    "bf16": "set it through policy.dtype",
    "fp16": "set it through policy.dtype",
    "params_dtype": "set it through policy.dtype",
    "optimizer": "policy.optimizer describes AdamW",
    "decoupled_weight_decay": "policy.optimizer describes AdamW",
    "apply_wd_to_qk_layernorm": "no norm decays",
    "timers": "it is not a value that a recipe can hold",
}


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """Megatron's OptimizerConfig. Raises ValueError for refused `policy.optimizer.megatron` fields."""
    section = policy.optimizer
    overrides = checked_overrides(OptimizerConfig, section.megatron, _DERIVED, "policy.optimizer.megatron")
    return OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        use_distributed_optimizer=section.distributed,
        overlap_param_gather=bool(policy.ddp.get("overlap_param_gather", False)),
        bf16=policy.dtype is Dtype.bf16,
        params_dtype=TORCH_DTYPE[policy.dtype],
        **overrides,
    )


def build_optimizer(
    recipe: Recipe, chunks: Sequence[DistributedDataParallel], layout: Layout
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over this rank's wrapped chunks and its schedule, counted in optimizer steps. Collective.

    The scheduler's `state_dict` and `load_state_dict` carry the step number; the recipe, not the checkpoint, says what
    the schedule is.
    """
    optimizer = get_megatron_optimizer(
        optimizer_config(recipe.policy),
        list(chunks),
        config_overrides={ParamKey(with_name_predicate=_NO_DECAY): ParamGroupOverride(wd_mult=0.0)},
        use_gloo_process_groups=False,
        pg_collection=layout.pgs,
    )
    return optimizer, _scheduler(recipe.policy.optimizer, optimizer, recipe.run.steps * recipe.batch.mini_batches)


def _scheduler(section: OptimizerSection, optimizer: MegatronOptimizer, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = section.decay_steps if section.decay_steps is not None else total_steps
    if section.schedule is Schedule.constant:
        # Megatron asks for more steps than the warm-up takes, though a constant schedule has no use for them.
        decay_steps = section.warmup_steps + 1
    elif decay_steps <= section.warmup_steps:
        raise ValueError(
            f"policy.optimizer.warmup_steps {section.warmup_steps} leaves no step of decay_steps {decay_steps} "
            f"(the default is run.steps x batch.mini_batches) to decay in; lower it or raise decay_steps"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=section.schedule.value,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


_NO_DECAY = ParamWithNamePredicate(
    name="norms_and_biases", fn=lambda parameter, name: parameter.dim() == 1 or name.endswith(".bias")
)
