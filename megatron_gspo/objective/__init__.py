"""The mathematics: advantages, ratios, losses and their metrics. Pure torch; of parallelism it knows one group."""

from megatron_gspo.objective.advantage import group_relative, leave_one_out, zero_variance_share
from megatron_gspo.objective.aggregate import Totals, token_weights
from megatron_gspo.objective.cispo import cispo
from megatron_gspo.objective.correction import (
    Correction,
    icepop,
    off_policy_sequence_mask,
    sequence_mask,
    truncated_importance_sampling,
)
from megatron_gspo.objective.diagnostics import policy_diagnostics
from megatron_gspo.objective.dppo import dppo
from megatron_gspo.objective.gae import gae
from megatron_gspo.objective.gmpo import gmpo
from megatron_gspo.objective.grpo import clipped_tokens
from megatron_gspo.objective.gspo import gspo_token
from megatron_gspo.objective.metrics import Metric, merge, reduce_metrics
from megatron_gspo.objective.minirl import minirl
from megatron_gspo.objective.policy_loss import policy_loss
from megatron_gspo.objective.sapo import sapo
from megatron_gspo.objective.sft import sft_loss
from megatron_gspo.objective.surrogate import Objective, Surrogate
from megatron_gspo.objective.tokens import Tokens
from megatron_gspo.objective.value import ValueTokens, value_loss
from megatron_gspo.objective.vespo import vespo

__all__ = [
    "Correction",
    "Metric",
    "Objective",
    "Surrogate",
    "Tokens",
    "Totals",
    "ValueTokens",
    "cispo",
    "clipped_tokens",
    "dppo",
    "gae",
    "gmpo",
    "group_relative",
    "gspo_token",
    "icepop",
    "leave_one_out",
    "merge",
    "minirl",
    "off_policy_sequence_mask",
    "policy_diagnostics",
    "policy_loss",
    "reduce_metrics",
    "sapo",
    "sequence_mask",
    "sft_loss",
    "token_weights",
    "truncated_importance_sampling",
    "value_loss",
    "vespo",
    "zero_variance_share",
]
