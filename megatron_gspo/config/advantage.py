"""Advantage estimators that a recipe may choose. Each names only the keys that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.config.key import key


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages; `estimator` selects the class in ESTIMATORS, and with it the other keys."""

    estimator: str = key("the advantage estimator", "group")


@dataclass(frozen=True, kw_only=True)
class GroupConfig(AdvantageConfig):
    """Reward minus the mean of its group (the responses to one prompt), over the group's standard deviation."""

    estimator: str = key("the advantage estimator", "group")
    normalize_std: bool = key(
        "divide by the standard deviation of the group (ddof 1); false where the objective is dr_grpo, dppo or minirl, "
        "unless set",
        True,
    )
    eps: float = key("added to the standard deviation", 1e-6, ge=0)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutConfig(AdvantageConfig):
    """Reward minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740)."""

    estimator: str = key("the advantage estimator", "leave_one_out")


@dataclass(frozen=True, kw_only=True)
class GaeConfig(AdvantageConfig):
    """Generalized advantage estimation (arXiv 1506.02438) with the critic's values, one advantage per token."""

    estimator: str = key("the advantage estimator", "gae")
    gamma: float = key("discount per token", 1.0, gt=0, le=1)
    lam: float = key("lambda: 0 is the one-step error, 1 is the return minus the value", 0.95, ge=0, le=1)
    whiten: bool = key("shift and scale the batch's advantages to mean 0 and standard deviation 1", True)


ESTIMATORS: dict[str, type[AdvantageConfig]] = {
    "group": GroupConfig,
    "leave_one_out": LeaveOneOutConfig,
    "gae": GaeConfig,
}
