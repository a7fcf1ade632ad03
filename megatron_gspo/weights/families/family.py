"""What a model family is: its HF `model_type`, the model that Megatron builds for it, and the rules between the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.weights.families.rope import Rope
from megatron_gspo.weights.rules import Rule

HFConfig = Mapping[str, Any]  # config.json, as written


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The model of one config.json, whatever the layout and the recipe.

    `transformer` are fields of Megatron-Core's TransformerConfig, of MLATransformerConfig where they set
    `multi_latent_attention`. `rope` is None where attention turns its queries and keys itself. `tied`: the output layer
    is the embedding. `norm_all_heads`: QK-norm is one RMS over all heads of a token instead of one per head.
    `latent_norm_eps`: epsilon of the norms of multi-latent attention.
    """

    transformer: Mapping[str, Any]
    rope: Rope | None
    tied: bool
    norm_all_heads: bool = False
    latent_norm_eps: float | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts."""
        pattern = self.transformer.get("moe_layer_freq", ())
        return tuple(layer for layer, sparse in enumerate(pattern) if sparse)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`architecture(hf_config)` raises ValueError for a feature that Megatron would silently lack.

    `rules(hf_config)` claims every HF tensor of the model that trains. Regular expressions name the others:
    `carried(hf_config)` those that no model holds and exports hand on bit for bit (multi-token-prediction layers),
    `ignored` those that carry no weights (buffers that older checkpoints saved). Any other tensor stops a load.
    """

    model_type: str
    architecture: Callable[[HFConfig], Architecture]
    rules: Callable[[HFConfig], Sequence[Rule]]
    carried: Callable[[HFConfig], tuple[str, ...]] = lambda hf_config: ()
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def need(hf_config: HFConfig, *keys: str) -> Any:
    """The value of the first of `keys` (one field under its older and newer names) that config.json sets."""
    for key in keys:
        if hf_config.get(key) is not None:
            return hf_config[key]
    raise ValueError(f"config.json of a {hf_config.get('model_type')} model must set {' or '.join(keys)}")


def refuse(hf_config: HFConfig, **reasons: tuple[bool, str]) -> None:
    """Raise ValueError for the first field whose (refused, why) is refused."""
    for field, (refused, why) in reasons.items():
        if refused:
            raise ValueError(f"HF config, {field}: {why} (value: {hf_config.get(field)!r})")
