"""A rank's Megatron parameters tied to the HF tensors that they hold, every parameter by exactly one rule."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_gspo.weights.claims import Claim, claims_of, listing
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.families.family import Family, HFConfig
from megatron_gspo.weights.rules import Piece

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True, eq=False)
class Bound:
    """One parameter of this rank, or persistent buffer: shard `rank` of `size` of `claim`. `name` is Megatron's, with
    local numbers."""

    claim: Claim
    name: str
    parameter: torch.Tensor
    is_copy: bool
    rank: int
    size: int

    def pieces(self) -> Iterator[Piece]:
        """What the parameter shares with the claim's HF tensors."""
        return self.claim.rule.pieces(self.rank, self.size, tuple(self.parameter.shape))


@dataclass(frozen=True, eq=False)
class Binding:
    """`claims` of the whole model, the same on every rank, and the parameters `bound` on this one. `carried`: regular
    expressions of the HF tensors that no model holds and exports hand on."""

    family: Family
    hf_config: HFConfig
    claims: tuple[Claim, ...]
    bound: tuple[Bound, ...]
    pgs: ProcessGroupCollection
    carried: tuple[str, ...]


def bind(
    chunks: Sequence[GPTModel], hf_config: HFConfig, pgs: ProcessGroupCollection, *, fresh: Collection[str] = ()
) -> Binding:
    """Ties the parameters of this rank's model `chunks` (bare, not wrapped in DDP) to HF tensors, and the buffers that
    are saved with them (the routers' expert biases). Not a collective.

    fresh: names of Megatron parameters that no HF tensor holds, such as a value head in the place of the output layer.
    They stay unbound; an HF tensor that a rule has for them is known to `load_hf`, and not read.
    Layers get their global numbers from `layer_number`, experts theirs from the EP rank, so uneven and virtual
    pipelines need nothing more. Multi-token-prediction layers are bound where the model was built with them, and
    carried where it was not. Raises ValueError naming the parameters that no rule or several rules claim, the HF
    tensors that several rules claim or that this rank's layers ought to hold and do not, and shapes that disagree with
    config.json.
    """
    family = family_for(hf_config)
    further = bool(chunks[0].config.mtp_num_layers)
    claims = claims_of(family.all_rules(hf_config) if further else family.rules(hf_config))
    book = _Book(claims)
    ep_rank, ep_size = pgs.ep.rank(), pgs.ep.size()
    bound: list[Bound] = []
    problems: dict[str, list[str]] = defaultdict(list)
    for chunk in chunks:
        layer_numbers = _layer_numbers(chunk)
        for name, parameter in _state(chunk):
            if name in fresh:
                continue
            found = book.find(name, layer_numbers, ep_rank, ep_size)
            if len(found) != 1:
                problems["that no rule claims" if not found else "that several rules claim"].append(name)
                continue
            claim, is_copy = found[0]
            # The last stage has multi-token-prediction layers read an embedding of its own.
            is_copy |= name.startswith("embedding.") and not chunk.pre_process
            group = pgs.expt_tp if claim.is_expert else pgs.tp
            bound.append(Bound(claim, name, parameter, is_copy, group.rank(), group.size()))
    if problems:
        kinds = "; ".join(f"Megatron parameters {kind}: {listing(names)}" for kind, names in problems.items())
        raise ValueError(f"model_type {family.model_type}: {kinds}. Every parameter needs exactly one rule")
    _check_shapes(bound)
    _check_complete(claims, bound, chunks, ep_rank, ep_size)
    return Binding(family, hf_config, claims, tuple(bound), pgs, () if further else family.carried(hf_config))


def _layer_numbers(chunk: GPTModel) -> dict[str, list[int]]:
    """Global numbers of the chunk's layers, by the module that holds them."""
    numbers = {"decoder": [layer.layer_number - 1 for layer in chunk.decoder.layers]}
    if chunk.mtp_process:
        numbers["mtp"] = [chunk.config.num_layers + layer.layer_number - 1 for layer in chunk.mtp.layers]
    return numbers


def _state(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, by name; other buffers are counters and caches."""
    yield from chunk.named_parameters()
    for path, module in chunk.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


class _Book:
    """Looks a Megatron parameter up by the name templates of all rules."""

    def __init__(self, claims: Sequence[Claim]):
        self._claims: Mapping[tuple, list[tuple[Claim, bool]]] = defaultdict(list)
        self._experts: dict[str, int] = {}
        for claim in claims:
            for is_copy, templates in ((False, claim.rule.megatron), (True, claim.rule.copies)):
                for template in templates:
                    self._claims[template, claim.layer, claim.expert].append((claim, is_copy))
                    self._experts[template] = claim.rule.experts or 0
        self._patterns = {template: _pattern(template) for template in self._experts}

    def find(
        self, name: str, layer_numbers: Mapping[str, Sequence[int]], ep_rank: int, ep_size: int
    ) -> list[tuple[Claim, bool]]:
        found = []
        for template, pattern in self._patterns.items():
            match = pattern.fullmatch(name)
            if match is None:
                continue
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            layer = layer_numbers[name.partition(".")[0]][numbers["layer"]] if "layer" in numbers else None
            expert = None
            if "expert" in numbers:
                expert = ep_rank * (self._experts[template] // ep_size) + numbers["expert"]
            found += self._claims.get((template, layer, expert), [])
        return found


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for number in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
    return re.compile(escaped)


def _check_shapes(bound: Sequence[Bound]) -> None:
    wrong = []
    for entry in bound:
        rule, local = entry.claim.rule, tuple(entry.parameter.shape)
        if not rule.fits(local, entry.size):
            tensors = ", ".join(f"{t.name} {list(t.shape)}" for t in entry.claim.hf)
            expected = list(rule.local_shape(entry.size))
            wrong.append(f"{entry.name} is {list(local)}, expected {expected} (1/{entry.size} of {tensors})")
    if wrong:
        raise ValueError(
            "Megatron parameters whose shapes disagree with config.json (was the model built from it?): "
            + "; ".join(wrong[:20])
        )


def _check_complete(
    claims: Sequence[Claim], bound: Sequence[Bound], chunks: Sequence[GPTModel], ep_rank: int, ep_size: int
) -> None:
    layers = {layer for chunk in chunks for numbers in _layer_numbers(chunk).values() for layer in numbers}
    held: dict[int, list[str]] = defaultdict(list)
    for entry in bound:
        if not entry.is_copy:
            held[entry.claim.index].append(entry.name)
    twice = [" and ".join(names) for names in held.values() if len(names) > 1]
    if twice:
        raise ValueError(f"Megatron parameters that hold the same HF tensors: {listing(twice)}")
    lost = [
        tensor.name
        for claim in claims
        if claim.layer in layers and _is_ours(claim, ep_rank, ep_size) and claim.index not in held
        for tensor in claim.hf
    ]
    if lost:
        raise ValueError(
            f"HF tensors that config.json promises and no Megatron parameter of this rank holds: {listing(lost)}"
        )


def _is_ours(claim: Claim, ep_rank: int, ep_size: int) -> bool:
    if claim.expert is None or claim.rule.experts is None:
        return True
    return claim.expert // (claim.rule.experts // ep_size) == ep_rank
