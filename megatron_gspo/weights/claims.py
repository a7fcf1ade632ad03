"""A family's rules written out for one model: one claim per Megatron parameter of the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from megatron_gspo.weights.rules import FURTHER, HFTensor, Rule


@dataclass(frozen=True)
class Claim:
    """`rule` at global `layer` and `expert`. `index` is its place in the list of all claims, the same on every rank."""

    index: int
    rule: Rule
    layer: int | None
    expert: int | None
    hf: tuple[HFTensor, ...]

    @property
    def is_further(self) -> bool:
        """Whether it is of a multi-token-prediction layer."""
        return self.rule.megatron[0].startswith(FURTHER)

    @property
    def is_expert(self) -> bool:
        """Whether the parameter is spread over EP and cut over ETP instead of TP."""
        return self.expert is not None


def claims_of(rules: Sequence[Rule]) -> tuple[Claim, ...]:
    """All claims of a model, in the order of `rules`.

    Raises ValueError naming every HF tensor that two claims name, and stacked ones that they do not cover.
    """
    places = [
        (rule, layer, expert)
        for rule in rules
        for layer in (rule.layers if rule.layers is not None else (None,))
        for expert in (range(rule.experts) if rule.experts is not None else (None,))
    ]
    claims = tuple(
        Claim(index, rule, layer, expert, tuple(_at(tensor, layer, expert) for tensor in rule.hf))
        for index, (rule, layer, expert) in enumerate(places)
    )
    counts = Counter(_spelling(tensor, claim.expert) for claim in claims for tensor in claim.hf)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"HF tensors that more than one rule claims: {listing(twice)}")
    left = Counter[str]()
    for claim in claims:
        for tensor in claim.hf:
            name, shape = tensor.exported
            left.setdefault(name, prod(shape))
            left[name] -= prod(tensor.shape)
    partial = [name for name, numbers in left.items() if numbers]
    if partial:
        raise ValueError(f"HF tensors that the rules do not cover exactly: {listing(partial)}")
    return claims


def listing(names: Iterable[str], limit: int = 20) -> str:
    """Names for an error message: all of them, or the first `limit` and how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _spelling(tensor: HFTensor, expert: int | None) -> str:
    """The name that no other claim may name: of the tensor, or of the rows of the only tensor that holds it."""
    stacked = tensor.stacked
    if stacked is None or not stacked.only:
        return tensor.name
    return f"{stacked.name}[{expert}, {stacked.row}::{stacked.step}]"


def _at(tensor: HFTensor, layer: int | None, expert: int | None) -> HFTensor:
    stacked = tensor.stacked
    if stacked is not None:
        stacked = replace(stacked, name=stacked.name.format(layer=layer, expert=expert))
    name, *others = (name.format(layer=layer, expert=expert) for name in (tensor.name, *tensor.other_names))
    return replace(tensor, name=name, stacked=stacked, other_names=tuple(others))
