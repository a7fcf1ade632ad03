"""One helper for every configuration field: its documentation travels with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import MISSING


def key(doc: str, default: Any = MISSING, *, factory: Any = None) -> Any:
    """A dataclass field documented with `doc`. Without a default the recipe must set it (OmegaConf's `MISSING`)."""
    metadata = {"doc": doc}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
