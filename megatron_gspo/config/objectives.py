"""Objectives and advantage estimators that a recipe may choose. Each names only the keys that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from megatron_gspo.config.key import key


class OnRatio(StrEnum):
    """What ratios away from 1 on the first mini-batch of an on-policy step do to the run."""

    stop = "stop"
    warn = "warn"


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is optimised; `name` selects the class in OBJECTIVES, and with it the other keys.

    `sections` are those of the recipe's optional sections that the objective uses; the others must be absent.
    """

    sections: ClassVar[frozenset[str]] = frozenset()

    name: str = key("the objective")


@dataclass(frozen=True, kw_only=True)
class GspoConfig(ObjectiveConfig):
    """Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 to 7)."""

    sections: ClassVar[frozenset[str]] = frozenset({"advantage", "rollout", "reward"})

    name: str = key("the objective", "gspo")
    clip_low: float = key("sequence ratios below 1 - clip_low are clipped (paper: 3e-4)", 3e-4, gt=0, lt=1)
    clip_high: float = key("sequence ratios above 1 + clip_high are clipped (paper: 4e-4)", 4e-4, gt=0)
    on_policy_check: OnRatio = key(
        "what |log s| above a tenth of the smaller clip bound on a step's first mini-batch does", OnRatio.stop
    )


@dataclass(frozen=True, kw_only=True)
class SftConfig(ObjectiveConfig):
    """Cross-entropy on given responses, averaged over all response tokens of the mini-batch."""

    name: str = key("the objective", "sft")


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {"gspo": GspoConfig, "sft": SftConfig}


class Estimator(StrEnum):
    """Advantage estimators. `group` is (r - mean of its group), over the group's std when `normalize_std`."""

    group = "group"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    estimator: Estimator = key("advantage estimator", Estimator.group)
    normalize_std: bool = key("divide by the standard deviation of the group (ddof 1)", True)
    eps: float = key("added to the standard deviation", 1e-6, ge=0)
