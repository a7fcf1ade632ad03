"""Corrections for the gap between the rollout engine and the trainer, independent of the objective."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_gspo.config.key import key
from megatron_gspo.config.objectives import LEAST, MOST


class Level(StrEnum):
    """What w = pi_old / pi_rollout is taken of: a token, the geometric mean over a response, or a whole response."""

    token = "token"
    sequence = "sequence"
    sequence_product = "sequence_product"


@dataclass(frozen=True, kw_only=True)
class TruncateConfig:
    """Truncated importance sampling (TIS): terms are multiplied by min(w, high)."""

    level: Level = key("what w is taken of", Level.token)
    high: float = key("w counts as at most this", 2.0, ge=1, le=MOST)


@dataclass(frozen=True, kw_only=True)
class IcepopConfig:
    """IcePop (arXiv 2510.18855): terms are multiplied by w where low <= w <= high, and dropped elsewhere."""

    level: Level = key("what w is taken of", Level.token)
    low: float = key("smallest w that counts", 0.5, ge=LEAST, le=1)
    high: float = key("largest w that counts", 5.0, ge=1, le=MOST)


@dataclass(frozen=True, kw_only=True)
class SequenceMaskConfig:
    """Responses whose geometric mean of w is not within [low, high] are dropped."""

    low: float = key("smallest geometric mean that counts", 0.99, ge=LEAST, le=1)
    high: float = key("largest geometric mean that counts", 1.01, ge=1, le=MOST)


@dataclass(frozen=True, kw_only=True)
class OpsmConfig:
    """Off-policy sequence masking (arXiv 2512.02556): drops responses with A < 0 that the policy has left behind."""

    delta: float = key("largest mean of log(pi_rollout / pi) over a response that counts", 1e-4, ge=LEAST, le=100)


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Weights and masks on the terms of tokens; at least one must be given."""

    truncate: TruncateConfig | None = key("truncated importance sampling", None)
    icepop: IcepopConfig | None = key("IcePop: weights within bounds, masks outside", None)
    sequence_mask: SequenceMaskConfig | None = key("drop responses by the geometric mean of w", None)
    opsm: OpsmConfig | None = key("drop negative responses that the policy has left behind", None)
