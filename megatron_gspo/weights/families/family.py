"""What a model family is: its HF `model_type`, its rules, and what its checkpoints may hold besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.weights.rules import Rule

HFConfig = Mapping[str, Any]  # config.json, as written


@dataclass(frozen=True, kw_only=True)
class Family:
    """`rules(hf_config)` claims every HF tensor of the model that trains. Regular expressions name the others:
    `carried(hf_config)` those that no model holds and exports hand on bit for bit (multi-token-prediction layers),
    `ignored` those that carry no weights (buffers that older checkpoints saved). Any other tensor stops a load.
    """

    model_type: str
    rules: Callable[[HFConfig], Sequence[Rule]]
    carried: Callable[[HFConfig], tuple[str, ...]] = lambda hf_config: ()
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def need(hf_config: HFConfig, *keys: str) -> Any:
    """The value of the first of `keys` (one field under its older and newer names) that config.json sets."""
    for key in keys:
        if hf_config.get(key) is not None:
            return hf_config[key]
    raise ValueError(f"config.json of a {hf_config.get('model_type')} model must set {' or '.join(keys)}")
