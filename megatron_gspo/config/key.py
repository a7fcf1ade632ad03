"""One helper for every configuration field: its documentation and its bounds travel with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import MISSING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Interval that a number must lie in; an end that is None is open."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def admits(self, value: float) -> bool:
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        ends = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(
            f"{sign} {end if isinstance(end, int) else f'{end:g}'}" for sign, end in ends if end is not None
        )


def key(
    doc: str,
    default: Any = MISSING,
    *,
    factory: Any = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """A dataclass field documented with `doc`. Without a default the recipe must set it (OmegaConf's `MISSING`).

    A value that is set must be > `gt`, >= `ge`, < `lt` and <= `le`, where given.
    """
    metadata = {"doc": doc, "bounds": Bounds(gt=gt, ge=ge, lt=lt, le=le)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
