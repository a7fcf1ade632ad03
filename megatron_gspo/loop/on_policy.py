"""The on-policy check: before the first update of a step the policy is its own old policy, so every ratio must be 1.

Ratios away from 1 there mean that scoring and updating run different numbers (kernels, packing, routing, precision,
stale weights); training would then clip on noise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_gspo.config import ObjectiveConfig, OnRatio, PolicyObjective

logger = logging.getLogger(__name__)


class OffPolicy(RuntimeError):
    """The ratios of the first mini-batch of a step are not 1."""


def check_on_policy(config: ObjectiveConfig, metrics: Sequence[dict[str, Any]], control: dist.ProcessGroup) -> None:
    """Compare the largest |log ratio| of a step's first mini-batch with a tenth of the smaller clip bound.

    Sequences with a bad value have no ratio; they are counted as `num_bad_sequences`.

    metrics: of this rank's micro-batches, empty off the last pipeline stage. Collective over all ranks of `control`;
    all raise OffPolicy together, before any parameter has changed.
    """
    if not isinstance(config, PolicyObjective):
        return
    found = [abs(float(metric[name].value)) for metric in metrics for name in config.checked_ratios]
    largest = torch.tensor([max(found, default=0.0)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=control)
    bound = config.on_policy_bound
    if largest.item() <= bound:
        return
    message = (
        f"first mini-batch: |log ratio| reaches {largest.item():.3e} before any update, above {bound:.1e} (a tenth of "
        "the smaller clip bound, at most 0.02). Score and update disagree: compare precision, recomputation and "
        "routing of both. objective.on_policy_check: warn continues anyway"
    )
    if config.on_policy_check is OnRatio.stop:
        raise OffPolicy(message)
    logger.warning(message)
