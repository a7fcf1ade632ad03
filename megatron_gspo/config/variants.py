"""Sections whose keys depend on one of them: the objective by its name, the advantage by its estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_gspo.config.advantage import ESTIMATORS, AdvantageConfig, GroupConfig
from megatron_gspo.config.objectives import OBJECTIVES, ObjectiveConfig


@dataclass(frozen=True)
class Variants:
    """`selector` is the key that chooses among `classes`; `default` is the class where it is not set, if any."""

    what: str
    selector: str
    classes: Mapping[str, type[Any]]
    default: type[Any] | None = None


VARIANTS: dict[type[Any], Variants] = {
    ObjectiveConfig: Variants("objective", "name", OBJECTIVES),
    AdvantageConfig: Variants("advantage estimator", "estimator", ESTIMATORS, GroupConfig),
}
# The recipe's sections that hold them.
SELECTORS: dict[str, str] = {"objective": "name", "advantage": "estimator"}


def variants_of(section: type[Any]) -> Variants | None:
    """The variants that the class `section` is the base or a member of."""
    return next((v for base, v in VARIANTS.items() if section is base or section in v.classes.values()), None)
