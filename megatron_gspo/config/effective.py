"""The effective configuration: every key with its value, as YAML that loads to an equal recipe."""

from __future__ import annotations

from omegaconf import OmegaConf

from megatron_gspo.config.schema import Recipe


def effective_yaml(recipe: Recipe) -> str:
    """All keys of `recipe`, defaults included, bases and overrides merged, interpolations resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))
