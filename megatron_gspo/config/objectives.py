"""Objectives that a recipe may choose. Each names only the keys that it uses, with its published defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from megatron_gspo.config.key import key

# Bounds of clip ranges and thresholds. Below the least, the rounding of fp32 log-probabilities would decide; the most
# leaves every ratio that occurs as it is.
LEAST, MOST = 1e-6, 1e6

WITH_STD = {"advantage": {"estimator": "group", "normalize_std": True}}
NO_STD = {"advantage": {"estimator": "group", "normalize_std": False}}


class OnRatio(StrEnum):
    """What ratios away from 1 on the first mini-batch of an on-policy step do to the run."""

    stop = "stop"
    warn = "warn"


class Aggregation(StrEnum):
    """How the terms of tokens add up; see `objective.aggregate.token_weights` for the formulas."""

    sequence_mean = "sequence_mean"
    token_mean = "token_mean"
    sequence_sum = "sequence_sum"
    constant = "constant"


class KlEstimator(StrEnum):
    """Estimates of KL(pi || pi_ref) from one sample, with d = log(pi / pi_ref): d, d^2 / 2, exp(-d) - 1 + d."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Divergence(StrEnum):
    """Divergence of the two-way distribution {sampled token, anything else}: total variation, or KL."""

    tv = "tv"
    kl = "kl"


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """A penalty on the divergence from a fixed reference policy, inside the loss."""

    coef: float = key("weight of the penalty (GRPO's paper: 0.04)", 0.04, ge=1e-8, le=1e3)
    estimator: KlEstimator = key(
        "of d = log(pi / pi_ref): k1 = d (whose gradient is 0 on average), k2 = d^2 / 2, k3 = exp(-d) - 1 + d",
        KlEstimator.k3,
    )
    reference: str | None = key("directory of the reference policy's HF checkpoint; null is policy.hf", None)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is optimised; `name` selects the class in OBJECTIVES, and with it the other keys.

    `sections` are those of the recipe's optional sections that the objective needs, `may_have` those that it can use;
    the others must be absent. `defaults` is what its paper has in other sections, where the recipe says nothing.
    """

    sections: ClassVar[frozenset[str]] = frozenset()
    may_have: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    name: str = key("the objective")


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(ObjectiveConfig):
    """Shared by all objectives that weigh sampled responses by importance ratios.

    token_advantages: advantages may differ along a response.
    anchored_to_rollout: pi_old is the rollout engine's policy, and nothing is scored before the update.
    uses_rollout_logp: the formula itself holds the rollout engine's log-probabilities.
    checked_ratios: the metrics whose absolute values an unchanged policy must keep within `on_policy_bound`.
    """

    sections: ClassVar[frozenset[str]] = frozenset({"advantage", "rollout", "reward"})
    may_have: ClassVar[frozenset[str]] = frozenset({"correction", "critic"})
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_STD
    token_advantages: ClassVar[bool] = True
    anchored_to_rollout: ClassVar[bool] = False
    uses_rollout_logp: ClassVar[bool] = False
    checked_ratios: ClassVar[tuple[str, ...]] = ("abs_log_ratio_max",)

    kl: KlConfig | None = key("penalty on the divergence from a reference policy; null is none", None)
    on_policy_check: OnRatio = key(
        "what |log ratio| above a tenth of the smaller clip bound (at most 0.02) on a step's first mini-batch does",
        OnRatio.stop,
    )

    @property
    def on_policy_bound(self) -> float:
        """Largest |log ratio| that a policy which is its own old policy may show."""
        bounds = (getattr(self, name, 1.0) for name in ("clip_low", "clip_high"))
        return min(0.2, *bounds) / 10


@dataclass(frozen=True, kw_only=True)
class GspoConfig(PolicyObjective):
    """Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 to 7)."""

    token_advantages: ClassVar[bool] = False

    name: str = key("the objective", "gspo")
    clip_low: float = key("sequence ratios below 1 - clip_low are clipped (paper: 3e-4)", 3e-4, ge=LEAST, lt=1)
    clip_high: float = key("sequence ratios above 1 + clip_high are clipped (paper: 4e-4)", 4e-4, ge=LEAST, le=MOST)


@dataclass(frozen=True, kw_only=True)
class GspoTokenConfig(GspoConfig):
    """GSPO-token (arXiv 2507.18071, equations 13 and 14): sequence ratios, advantages of tokens."""

    token_advantages: ClassVar[bool] = True

    name: str = key("the objective", "gspo_token")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyObjective):
    """Group Relative Policy Optimization (arXiv 2402.03300, equation 3)."""

    name: str = key("the objective", "grpo")
    clip_low: float = key("token ratios below 1 - clip_low are clipped", 0.2, ge=LEAST, lt=1)
    clip_high: float = key("token ratios above 1 + clip_high are clipped", 0.2, ge=LEAST, le=MOST)
    aggregation: Aggregation = key("how tokens add up", Aggregation.sequence_mean)
    kl: KlConfig | None = key("penalty on the divergence from a reference policy; null is none", factory=KlConfig)


@dataclass(frozen=True, kw_only=True)
class PpoConfig(PolicyObjective):
    """Proximal Policy Optimization (arXiv 1707.06347, equation 7) with a critic and GAE."""

    sections: ClassVar[frozenset[str]] = frozenset({"advantage", "rollout", "reward", "critic"})
    may_have: ClassVar[frozenset[str]] = frozenset({"correction"})
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"advantage": {"estimator": "gae"}, "critic": {}}

    name: str = key("the objective", "ppo")
    clip_low: float = key("token ratios below 1 - clip_low are clipped", 0.2, ge=LEAST, lt=1)
    clip_high: float = key("token ratios above 1 + clip_high are clipped", 0.2, ge=LEAST, le=MOST)
    aggregation: Aggregation = key("how tokens add up", Aggregation.token_mean)


@dataclass(frozen=True, kw_only=True)
class DapoConfig(PolicyObjective):
    """The loss of DAPO (arXiv 2503.14476, equation 8): clip-higher and token-mean.

    The method's other halves are rollout.dynamic_sampling and reward.overlong, which any objective may use.
    """

    name: str = key("the objective", "dapo")
    clip_low: float = key("token ratios below 1 - clip_low are clipped", 0.2, ge=LEAST, lt=1)
    clip_high: float = key("token ratios above 1 + clip_high are clipped", 0.28, ge=LEAST, le=MOST)
    aggregation: Aggregation = key("how tokens add up", Aggregation.token_mean)


@dataclass(frozen=True, kw_only=True)
class DrGrpoConfig(PolicyObjective):
    """Dr.GRPO (arXiv 2503.20783): no std in the advantages, a constant in place of |y_i|."""

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = NO_STD

    name: str = key("the objective", "dr_grpo")
    clip_low: float = key("token ratios below 1 - clip_low are clipped", 0.2, ge=LEAST, lt=1)
    clip_high: float = key("token ratios above 1 + clip_high are clipped", 0.2, ge=LEAST, le=MOST)
    aggregation: Aggregation = key(
        "how tokens add up; constant divides by rollout.max_new_tokens", Aggregation.constant
    )


@dataclass(frozen=True, kw_only=True)
class SapoConfig(PolicyObjective):
    """Soft Adaptive Policy Optimization (arXiv 2511.20347, equations 5 and 6)."""

    name: str = key("the objective", "sapo")
    tau_pos: float = key("temperature of the gate where the advantage is positive", 1.0, ge=1e-3, le=1e3)
    tau_neg: float = key("temperature of the gate elsewhere", 1.05, ge=1e-3, le=1e3)
    aggregation: Aggregation = key("how tokens add up", Aggregation.sequence_mean)


@dataclass(frozen=True, kw_only=True)
class CispoConfig(PolicyObjective):
    """Clipped Importance Sampling Policy Optimization (arXiv 2506.13585, equations 4 and 5)."""

    name: str = key("the objective", "cispo")
    clip_high: float = key("token weights count as at most 1 + clip_high", 4.0, ge=LEAST, le=MOST)
    aggregation: Aggregation = key("how tokens add up", Aggregation.token_mean)


@dataclass(frozen=True, kw_only=True)
class GmpoConfig(PolicyObjective):
    """Geometric-Mean Policy Optimization (arXiv 2507.20673, equation 4)."""

    token_advantages: ClassVar[bool] = False

    name: str = key("the objective", "gmpo")
    clip_low: float = key("log token ratios below -clip_low are clipped (paper: 0.4)", 0.4, ge=LEAST, le=100)
    clip_high: float = key("log token ratios above clip_high are clipped (paper: 0.4)", 0.4, ge=LEAST, le=100)


@dataclass(frozen=True, kw_only=True)
class VespoConfig(PolicyObjective):
    """Variational Sequence-level Soft Policy Optimization (arXiv 2602.10693)."""

    token_advantages: ClassVar[bool] = False
    # Its own ratio is a product over all tokens, of which rounding alone makes a large number.
    checked_ratios: ClassVar[tuple[str, ...]] = ("token_log_ratio_min", "token_log_ratio_max")

    name: str = key("the objective", "vespo")
    k_pos: float = key("power of the sequence ratio where the advantage is not negative", 2.0, ge=1e-3, le=1e3)
    lambda_pos: float = key("decay in the sequence ratio where the advantage is not negative", 3.0, ge=1e-3, le=1e3)
    k_neg: float = key("power of the sequence ratio where the advantage is negative", 3.0, ge=1e-3, le=1e3)
    lambda_neg: float = key("decay in the sequence ratio where the advantage is negative", 2.0, ge=1e-3, le=1e3)
    aggregation: Aggregation = key("how tokens add up", Aggregation.token_mean)


@dataclass(frozen=True, kw_only=True)
class DppoConfig(PolicyObjective):
    """Divergence Proximal Policy Optimization (arXiv 2602.04879): a trust region around the rollout engine's policy.

    Defaults are those of its scaling experiments (appendix E), with LoRA apart: there delta is 0.15 for tv. Its
    stability analysis (appendix C) has 0.15 for tv, 0.05 for kl, and no bound on ratios.
    """

    may_have: ClassVar[frozenset[str]] = frozenset({"critic"})
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = NO_STD
    anchored_to_rollout: ClassVar[bool] = True

    name: str = key("the objective", "dppo")
    divergence: Divergence = key("divergence of the sampled token's probability", Divergence.tv)
    delta: float | None = key(
        "steps away from the engine's policy are masked beyond it; null is the paper's: 0.2 for tv, 0.05 for kl",
        None,
        ge=LEAST,
        le=100,
    )
    max_ratio: float = key("token ratios count as at most this (paper: 5)", 5.0, ge=1, le=MOST)
    aggregation: Aggregation = key("how tokens add up", Aggregation.token_mean)

    @property
    def threshold(self) -> float:
        """The divergence beyond which steps away are masked."""
        return {Divergence.tv: 0.2, Divergence.kl: 0.05}[self.divergence] if self.delta is None else self.delta


@dataclass(frozen=True, kw_only=True)
class MinirlConfig(PolicyObjective):
    """MiniRL (arXiv 2512.01374): REINFORCE with the engines' gap corrected and the policy's staleness clipped."""

    may_have: ClassVar[frozenset[str]] = frozenset({"critic"})
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = NO_STD
    uses_rollout_logp: ClassVar[bool] = True

    name: str = key("the objective", "minirl")
    clip_low: float = key(
        "tokens with a negative advantage are masked where the ratio is below 1 - clip_low", 0.2, ge=LEAST, lt=1
    )
    clip_high: float = key(
        "tokens with a positive advantage are masked where the ratio is above 1 + clip_high", 0.27, ge=LEAST, le=MOST
    )
    max_weight: float = key("pi / pi_rollout of a token counts as at most this", 5.0, ge=1, le=MOST)
    aggregation: Aggregation = key("how tokens add up", Aggregation.sequence_sum)


@dataclass(frozen=True, kw_only=True)
class SftConfig(ObjectiveConfig):
    """Cross-entropy on given responses, averaged over all response tokens of the mini-batch."""

    name: str = key("the objective", "sft")


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "gspo": GspoConfig,
    "gspo_token": GspoTokenConfig,
    "grpo": GrpoConfig,
    "ppo": PpoConfig,
    "dapo": DapoConfig,
    "dr_grpo": DrGrpoConfig,
    "sapo": SapoConfig,
    "cispo": CispoConfig,
    "gmpo": GmpoConfig,
    "vespo": VespoConfig,
    "dppo": DppoConfig,
    "minirl": MinirlConfig,
    "sft": SftConfig,
}
