"""Published models, from their config.json (configs/<model>.json) alone."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

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


def assert_tensors_of(model: str, made: type[PreTrainedModel]) -> None:
    """The family's rules claim exactly the tensors, by name and shape, that transformers makes of the same config."""
    c = config(model)
    claims = claims_of(family_for(c).rules(c))
    ours = {
        (tensor.stacked.name, tensor.stacked.shape) if tensor.stacked else (tensor.name, tensor.shape)
        for claim in claims
        for tensor in claim.hf
    }
    fields = {key: value for key, value in c.items() if key not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        state = made(made.config_class(**fields)).state_dict()
    assert ours == {(name, tuple(tensor.shape)) for name, tensor in state.items()}
