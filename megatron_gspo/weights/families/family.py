"""What a model family is: its HF `model_type`, the model that Megatron builds for it, and the rules between the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_gspo.weights.families.rope import Rope
from megatron_gspo.weights.rules import HFTensor, Rule

HFConfig = Mapping[str, Any]  # config.json, as written
COUNTS = ("_layers", "_heads", "_size", "_experts", "_per_tok")  # ends of names of whole numbers


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

    def __post_init__(self) -> None:
        experts, chosen = self.transformer.get("num_moe_experts"), self.transformer.get("moe_router_topk")
        if experts and chosen > experts:
            raise ValueError(f"HF config, num_experts_per_tok: expected at most the {experts} experts, got {chosen}")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts."""
        pattern = self.transformer.get("moe_layer_freq", ())
        return tuple(layer for layer, sparse in enumerate(pattern) if sparse)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`architecture(hf_config)` raises ValueError for a feature that Megatron would silently lack.

    `rules(hf_config)` claims every HF tensor of the model that samples. `further(hf_config)` are the numbers of the
    multi-token-prediction layers, which stand behind the model's own in the checkpoint: exports hand their tensors on
    bit for bit, or they train beside the model and `further_rules(hf_config)` claims them. `ignored`: regular
    expressions of tensors without weights (buffers that older checkpoints saved). Any other tensor stops a load.
    """

    model_type: str
    architecture: Callable[[HFConfig], Architecture]
    rules: Callable[[HFConfig], Sequence[Rule]]
    further: Callable[[HFConfig], range] = lambda hf_config: range(0)
    further_rules: Callable[[HFConfig], Sequence[Rule]] | None = None
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")

    def carried(self, hf_config: HFConfig) -> tuple[str, ...]:
        """Regular expressions of the tensors that no model holds where multi-token-prediction layers do not train."""
        return tuple(rf"model\.layers\.{layer}\..*" for layer in self.further(hf_config))

    def trained_further(self, hf_config: HFConfig) -> range:
        """`further`, to be trained. Raises ValueError for a model that has none, or none that is built here."""
        layers = self.further(hf_config)
        if self.further_rules is None or not layers:
            raise ValueError(
                f"policy.mtp: train: this {self.model_type} model has no multi-token-prediction layers that can train; "
                "leave it at carry"
            )
        refuse(
            hf_config,
            tie_word_embeddings=(
                bool(hf_config.get("tie_word_embeddings")),
                "policy.mtp: train: Megatron cannot store a tied output layer beside multi-token-prediction layers",
            ),
        )
        return layers

    def all_rules(self, hf_config: HFConfig) -> list[Rule]:
        """`rules` and `further_rules`. These layers read the model's embedding and write to its output layer, which
        checkpoints hold once more under their numbers. Raises as `trained_further`."""
        layers = self.trained_further(hf_config)
        assert self.further_rules is not None
        shared = {"model.embed_tokens.weight": "embed_tokens", "lm_head.weight": "shared_head.head"}

        def repeated(tensor: HFTensor) -> HFTensor:
            names = tuple(f"model.layers.{layer}.{shared[tensor.name]}.weight" for layer in layers)
            return replace(tensor, repeats=names)

        rules = [
            replace(rule, hf=tuple(repeated(tensor) if tensor.name in shared else tensor for tensor in rule.hf))
            for rule in self.rules(hf_config)
        ]
        return [*rules, *self.further_rules(hf_config)]


def need(hf_config: HFConfig, *keys: str) -> Any:
    """The value of the first of `keys` (one field under its older and newer names) that config.json sets."""
    for key in keys:
        value = hf_config.get(key)
        if value is not None:
            if key.endswith(COUNTS) and (type(value) is not int or value < 1):
                raise ValueError(f"HF config, {key}: expected a whole number of at least 1, got {value!r}")
            return value
    raise ValueError(f"config.json of a {hf_config.get('model_type')} model must set {' or '.join(keys)}")


def refuse(hf_config: HFConfig, **reasons: tuple[bool, str]) -> None:
    """Raise ValueError for the first field whose (refused, why) is refused."""
    for field, (refused, why) in reasons.items():
        if refused:
            raise ValueError(f"HF config, {field}: {why} (value: {hf_config.get(field)!r})")
