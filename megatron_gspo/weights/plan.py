"""Who sends which HF tensor. Pure: from what every rank holds to the same list of items and buckets on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod

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
class Item:
    """The HF tensors of one claim: `ranks` hold its shards in this order, `sender`, one of them, gathers and sends."""

    claim: Claim
    dtype: torch.dtype
    ranks: tuple[int, ...]
    sender: int

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t.name, t.shape, self.dtype, self.sender) for t in self.claim.hf)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class ExportPlan:
    """Every HF tensor of the model once, in the family's order. The same on every rank, but for `binding`, its own."""

    items: tuple[Item, ...]
    binding: Binding = field(repr=False, compare=False)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for item in self.items for tensor in item.tensors)


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
    """A sender for every claim, in the dtype given or (None) that of the parameter.

    Only the first replica sends: the ranks with dp_cp rank 0 for dense parameters, with expert-dp rank 0 for experts.
    Among the TP (ETP) ranks that hold a claim's shards, the one with the fewest bytes to send so far takes it; so each
    pipeline stage sends its layers, each EP rank its experts, and TP ranks share the work.

    Raises ValueError naming HF tensors that no rank holds, or that ranks hold in part or in several places.
    """
    by_claim: dict[int, list[Holding]] = defaultdict(list)
    for holding in holdings:
        for index in holding.dtypes:
            if holding.is_first_replica(claims[index]):
                by_claim[index].append(holding)
    lost = [tensor.name for claim in claims if claim.index not in by_claim for tensor in claim.hf]
    if lost:
        raise ValueError(f"HF tensors that config.json promises and no rank holds: {listing(lost)}")
    load: dict[int, int] = defaultdict(int)
    items = []
    for claim in claims:
        held = by_claim[claim.index]
        ranks = held[0].shards(claim)
        if sorted(h.rank for h in held) != sorted(ranks) or len({h.dtypes[claim.index] for h in held}) != 1:
            raise ValueError(
                f"{claim.hf[0].name}: ranks {sorted(h.rank for h in held)} hold it as their first replica, expected "
                f"exactly ranks {list(ranks)} with one dtype; were all ranks built from one layout and recipe?"
            )
        sender = min(ranks, key=lambda rank: (load[rank], rank))
        item = Item(claim, dtype or held[0].dtypes[claim.index], ranks, sender)
        load[sender] += item.size_bytes
        items.append(item)
    return tuple(items)


def buckets(plan: ExportPlan, size_bytes: int) -> tuple[Bucket, ...]:
    """The plan's items in buckets of at most `size_bytes`, one sender each; a larger item has a bucket of its own.

    Senders take turns in the sequence.
    """
    if size_bytes <= 0:
        raise ValueError(f"size_bytes must be positive, got {size_bytes}")
    by_sender: dict[int, list[Item]] = defaultdict(list)
    for item in plan.items:
        by_sender[item.sender].append(item)
    turns = zip_longest(*(_lots(by_sender[sender], size_bytes) for sender in sorted(by_sender)))
    return tuple(
        Bucket(items[0].sender, tuple(items), plan.binding) for turn in turns for items in turn if items is not None
    )


def parts(bucket: Bucket, size_bytes: int) -> tuple[Bucket, ...]:
    """`bucket` in smaller ones, in its order."""
    return tuple(Bucket(bucket.sender, tuple(lot), bucket.binding) for lot in _lots(bucket.items, size_bytes))


def _lots(items: Sequence[Item], size_bytes: int) -> list[list[Item]]:
    lots: list[list[Item]] = []
    filled = 0
    for item in items:
        if not lots or filled + item.size_bytes > size_bytes:
            lots.append([])
            filled = 0
        lots[-1].append(item)
        filled += item.size_bytes
    return lots
