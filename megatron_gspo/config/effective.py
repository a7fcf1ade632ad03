"""The effective configuration: every key with its value, as YAML that loads to an equal recipe."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from megatron_gspo.config.schema import Recipe

RECIPE_FILE = "recipe.yaml"  # what a run calls its effective recipe in run.dir


def effective_yaml(recipe: Recipe) -> str:
    """All keys of `recipe`, defaults included, bases and overrides merged, interpolations resolved."""
    values = OmegaConf.to_container(OmegaConf.structured(recipe), enum_to_str=True)
    return OmegaConf.to_yaml(OmegaConf.create(_escape(values))).rstrip() + "\n"


def _escape(value: Any) -> Any:
    """`value` with every literal `${` escaped, so that loading does not take it for an interpolation."""
    if isinstance(value, dict):
        return {name: _escape(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_escape(child) for child in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
