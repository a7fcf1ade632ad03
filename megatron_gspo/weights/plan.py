"""Who sends which HF tensor. Pure: from what every rank holds to the same list of items and buckets on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Protocol

import torch

from megatron_gspo.weights.bind import Binding
from megatron_gspo.weights.claims import Claim, listing
from megatron_gspo.weights.rules import Shape


@dataclass(frozen=True)
class Holding:
    """What one rank holds: dtype of every claim by its index, and who holds the other shards of them.

    `tp_ranks` and `etp_ranks` are global ranks in shard order, of dense and of expert parameters; `replica` and
    `expert_replica` number the groups that hold the same shards (ranks in the dp_cp and the expert-dp group).
    """

    rank: int
    tp_ranks: tuple[int, ...]
    etp_ranks: tuple[int, ...]
    replica: int
    expert_replica: int
    dtypes: Mapping[int, torch.dtype]

    def shards(self, claim: Claim) -> tuple[int, ...]:
        return self.etp_ranks if claim.is_expert else self.tp_ranks

    def is_first_replica(self, claim: Claim) -> bool:
        return (self.expert_replica if claim.is_expert else self.replica) == 0


@dataclass(frozen=True)
class TensorSpec:
    """One HF tensor as it leaves: full shape, dtype, and the global rank that sends it."""

    name: str
    shape: Shape
    dtype: torch.dtype
    sender: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A claim whose shards `ranks` hold, in this order."""

    claim: Claim
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """HF tensors that leave together: those of one claim or of dense ones whose rules say so or, where experts are
    exported stacked, the tensor that the claims of all experts make up. `sender`, one of the ranks, gathers and sends.
    """

    parts: tuple[Part, ...]
    dtype: torch.dtype
    sender: int

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for part in self.parts for rank in part.ranks)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        exported = dict(tensor.exported for part in self.parts for tensor in part.claim.hf)
        return tuple(TensorSpec(name, shape, self.dtype, self.sender) for name, shape in exported.items())

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def group(self) -> str:
        """The process group, by its field in ProcessGroupCollection, whose ranks hold the parts."""
        if not self.parts[0].claim.is_expert:
            return "tp"
        return "tp_ep" if len(self.parts) > 1 else "expt_tp"

    @property
    def is_gathered(self) -> bool:
        """Whether the sender alone does not hold all of it."""
        return len(self.ranks) > 1 and (self.group == "tp_ep" or any(part.claim.rule.is_cut for part in self.parts))


@dataclass(frozen=True)
class ExportPlan:
    """Every HF tensor of the model once, in the family's order. The same on every rank, but for `binding`, its own."""

    items: tuple[Item, ...]
    binding: Binding = field(repr=False, compare=False)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for item in self.items for tensor in item.tensors)

    def served(self) -> ExportPlan:
        """Without multi-token-prediction layers, which a server has not unless it decodes speculatively."""
        return replace(self, items=tuple(item for item in self.items if not item.parts[0].claim.is_further))


@dataclass(frozen=True)
class Bucket:
    """Items that one rank sends together."""

    sender: int
    items: tuple[Item, ...]
    binding: Binding = field(repr=False, compare=False)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for item in self.items for tensor in item.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def assign(claims: Sequence[Claim], holdings: Sequence[Holding], dtype: torch.dtype | None) -> tuple[Item, ...]:
    """A sender for every claim, in the dtype given or (None, and where the rule keeps it) that of the parameter.

    Only the first replica sends: the ranks with dp_cp rank 0 for dense parameters, with expert-dp rank 0 for experts.
    Among the ranks that hold an item, the one with the fewest bytes to send so far takes it; so each pipeline stage
    sends its layers, each EP rank its experts, and TP ranks share the work. EP ranks share that of stacked experts.

    Raises ValueError naming HF tensors that no rank holds, or that ranks hold in part or in several places.
    """
    by_claim: dict[int, list[Holding]] = defaultdict(list)
    for holding in holdings:
        for index in holding.dtypes:
            if holding.is_first_replica(claims[index]):
                by_claim[index].append(holding)
    lost = [tensor.exported[0] for claim in claims if claim.index not in by_claim for tensor in claim.hf]
    if lost:
        raise ValueError(f"HF tensors that config.json promises and no rank holds: {listing(dict.fromkeys(lost))}")
    load: dict[int, int] = defaultdict(int)
    items = []
    for together in _sent_together(claims):
        parts = tuple(_part(claim, by_claim[claim.index]) for claim in together)
        dtypes = {holding.dtypes[claim.index] for claim in together for holding in by_claim[claim.index]}
        if len(dtypes) != 1:
            raise ValueError(
                f"{together[0].hf[0].name}: its ranks hold it as {sorted(map(str, dtypes))}, not in one dtype"
            )
        sender = min((rank for part in parts for rank in part.ranks), key=lambda rank: (load[rank], rank))
        own = dtypes.pop()
        item = Item(parts, own if dtype is None or together[0].rule.keeps_dtype else dtype, sender)
        load[sender] += item.size_bytes
        items.append(item)
    return tuple(items)


def _sent_together(claims: Sequence[Claim]) -> Iterable[list[Claim]]:
    """The claims that share an exported tensor or leave together, in the order of the first of each."""
    groups: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        together = claim.rule.together
        groups[f"{together} of layer {claim.layer}" if together else claim.hf[0].exported[0]].append(claim)
    return groups.values()


def _part(claim: Claim, held: Sequence[Holding]) -> Part:
    ranks = held[0].shards(claim)
    if sorted(h.rank for h in held) != sorted(ranks):
        raise ValueError(
            f"{claim.hf[0].name}: ranks {sorted(h.rank for h in held)} hold it as their first replica, expected "
            f"exactly ranks {list(ranks)}; were all ranks built from one layout and recipe?"
        )
    return Part(claim, ranks)


def buckets(plan: ExportPlan, size_bytes: int) -> tuple[Bucket, ...]:
    """The plan's items in buckets of at most `size_bytes`, one sender each; a larger item has a bucket of its own.

    Senders take turns in the sequence.
    """
    if size_bytes <= 0:
        raise ValueError(f"size_bytes must be positive, got {size_bytes}")
    by_sender: dict[int, list[Item]] = defaultdict(list)
    for item in plan.items:
        by_sender[item.sender].append(item)
    turns = zip_longest(*(in_lots(by_sender[sender], size_bytes) for sender in sorted(by_sender)))
    return tuple(
        Bucket(items[0].sender, tuple(items), plan.binding) for turn in turns for items in turn if items is not None
    )


def parts(bucket: Bucket, size_bytes: int) -> tuple[Bucket, ...]:
    """`bucket` in smaller ones, in its order."""
    return tuple(Bucket(bucket.sender, tuple(lot), bucket.binding) for lot in in_lots(bucket.items, size_bytes))


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


def in_lots[S: Sized](items: Sequence[S], size_bytes: int) -> list[list[S]]:
    """`items` in their order, in lots of at most `size_bytes`; a larger item is a lot of its own."""
    lots: list[list[S]] = []
    filled = 0
    for item in items:
        if not lots or filled + item.size_bytes > size_bytes:
            lots.append([])
            filled = 0
        lots[-1].append(item)
        filled += item.size_bytes
    return lots
