"""Published models, from their config.json (configs/<model>.json) alone."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from megatron_gspo.weights.claims import claims_of
from megatron_gspo.weights.families import family_for


def config(model: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "configs" / f"{model}.json").read_text())


def num_parameters(model: str) -> int:
    """Of the HF tensors that the family's rules claim, in a model whose architecture is accepted."""
    family = family_for(config(model))
    family.architecture(config(model))
    claims = claims_of(family.rules(config(model)))
    return sum(prod(tensor.shape) for claim in claims for tensor in claim.hf)
