"""Which rank of a layout holds what, on paper: every rank is built in turn in a process group that only pretends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import lcm
from typing import Any

import torch.distributed as dist

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.convert.skeleton import built
from megatron_gspo.weights.bind import Bound, bind

KINDS = (  # what a name of an HF tensor holds, by the first part of it that is found
    ("shared_expert", "shared experts"),
    ("experts", "routed experts"),
    ("gate.", "routers"),
    ("router", "routers"),
    ("attn", "attention"),
    ("embed", "embedding"),
    ("lm_head", "output layer"),
    ("mlp", "dense MLPs"),
    ("norm", "norms"),
)


@dataclass(frozen=True)
class Ownership:
    """What one rank holds. `place`: its number in every dimension larger than 1."""

    rank: int
    place: Mapping[str, int]
    bound: tuple[Bound, ...]

    @property
    def numel(self) -> int:
        return sum(bound.parameter.numel() for bound in self.bound)

    def summary(self) -> str:
        """Layers and experts as ranges, and the parameters that belong to no layer."""
        layers = {bound.claim.layer for bound in self.bound if bound.claim.layer is not None}
        experts = {bound.claim.expert for bound in self.bound if bound.claim.expert is not None}
        others = [bound.name.removesuffix(".weight") for bound in self.bound if bound.claim.layer is None]
        ranges = [f"{what} {_ranges(found)}" for what, found in (("layers", layers), ("experts", experts)) if found]
        return "; ".join([*ranges, *others])


def parse_layout(text: str) -> LayoutConfig:
    """`tp=2,ep=4` as a layout. Raises ValueError naming what is no size of one."""
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in {"tp", "pp", "vpp", "cp", "ep", "etp"} or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"--layout {text}: {part!r} is no tp, pp, vpp, cp, ep or etp = a number, as in tp=2,ep=4")
        sizes[name] = int(value)
    return LayoutConfig(**sizes)


def smallest_world(layout: LayoutConfig) -> int:
    """Ranks of one replica of the model."""
    return layout.pp * lcm(layout.tp * layout.cp, layout.ep * layout.etp)


def owners(hf_config: Mapping[str, Any], layout: LayoutConfig, ranks: Iterable[int]) -> Iterator[Ownership]:
    """Builds `ranks` of the smallest world one after the other, without numbers. No process group may exist.

    Raises ValueError for layouts that the model cannot be cut into.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=smallest_world(layout))
        try:
            with built(hf_config, layout) as (model, place):
                names = [field.name for field in fields(layout) if hasattr(place, f"{field.name}_rank")]
                numbers = {name: getattr(place, f"{name}_rank") for name in names if getattr(layout, name) > 1}
                yield Ownership(rank, numbers, bind(model.chunks, hf_config, place.pgs).bound)
        finally:
            dist.destroy_process_group()


def _ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][-1:] = [parts[-1][-1], number] if len(parts[-1]) == 1 else [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def parameter_counts(names: Mapping[str, int]) -> Counter[str]:
    """Parameters by kind, of tensors given by HF name and number of elements."""
    counts: Counter[str] = Counter()
    for name, numel in names.items():
        counts[next((kind for part, kind in KINDS if part in name), "others")] += numel
    return counts
