"""The mathematics: advantages, ratios, losses and their metrics. Pure torch; of parallelism it knows one group."""

from megatron_gspo.objective.advantage import group_relative, zero_variance_share
from megatron_gspo.objective.diagnostics import policy_diagnostics
from megatron_gspo.objective.gspo import gspo_loss
from megatron_gspo.objective.metrics import Metric, merge, reduce_metrics
from megatron_gspo.objective.sft import sft_loss

__all__ = [
    "Metric",
    "group_relative",
    "gspo_loss",
    "merge",
    "policy_diagnostics",
    "reduce_metrics",
    "sft_loss",
    "zero_variance_share",
]
