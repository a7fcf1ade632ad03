"""A model without numbers: its parameters, tied to HF tensors and to the global tensors of a Megatron checkpoint.

On one tensor-, pipeline- and expert-parallel rank, Megatron's own `sharded_state_dict` says how every parameter is
stored. No layout is special to the format, so what is written from it loads into any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch.overrides import TorchFunctionMode

from megatron_gspo.config.schema import Dtype, LayoutConfig, Mtp, OptimizerSection, PolicyConfig
from megatron_gspo.policy.layout import Layout, init_layout
from megatron_gspo.policy.model import build_model
from megatron_gspo.weights.bind import Binding, Bound, bind
from megatron_gspo.weights.claims import listing
from megatron_gspo.weights.rules import Shape


@dataclass(frozen=True)
class Region:
    """A rectangle of the checkpoint's tensor `key`, and the view of the parameter that is stored there."""

    key: str
    global_shape: Shape
    offsets: Shape
    sizes: Shape
    shape: Shape
    stride: Shape
    start: int

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rectangle of a parameter that holds numbers [contiguous], in the checkpoint's shape. No copy."""
        return parameter.as_strided(self.shape, self.stride, self.start).view(self.sizes)


@dataclass(frozen=True)
class Entry:
    """A parameter and the regions that store it: every number once. `keeps_fp32`: whatever dtype is asked for."""

    bound: Bound
    regions: tuple[Region, ...]
    keeps_fp32: bool

    @property
    def numel(self) -> int:
        return self.bound.parameter.numel()


@dataclass(frozen=True)
class Skeleton:
    """`objects`: names of the empty states that Megatron's modules keep beside their parameters."""

    binding: Binding
    entries: tuple[Entry, ...]
    objects: tuple[str, ...]


class _NoNumbers(TorchFunctionMode):
    """`torch.empty`, by which Megatron makes parameters, gives tensors without memory; all others are real."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "empty":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def built(
    hf_config: Mapping[str, Any],
    layout_config: LayoutConfig,
    dtype: Dtype = Dtype.bf16,
    *,
    numbers: bool = False,
    mtp: Mtp = Mtp.carry,
) -> Iterator[tuple[Any, Layout]]:
    """(model, layout) on this rank of the default process group, whose groups end with the block. Without `numbers` the
    parameters take no memory; with them they are random."""
    policy = PolicyConfig(hf="", dtype=dtype, layout=layout_config, optimizer=OptimizerSection(lr=0.0), mtp=mtp)
    layout = init_layout(layout_config)
    try:
        with nullcontext() if numbers else _NoNumbers():
            model = build_model(dict(hf_config), policy, layout)
        yield model, layout
    finally:
        parallel_state.destroy_model_parallel()


def skeleton(hf_config: Mapping[str, Any], keys: Iterable[str] = ()) -> Skeleton:
    """The whole model of config.json. Every rank of the world describes all of it.

    keys: of the checkpoint's tensors; multi-token-prediction layers that trained are among them.

    Raises ValueError for a family that is not supported, and naming parameters that no rule claims or that the
    checkpoint would not store exactly once.
    """
    mtp = Mtp.train if any(key.startswith("mtp.") for key in keys) else Mtp.carry
    with built(hf_config, LayoutConfig(), mtp=mtp) as (model, layout):
        binding = bind(model.chunks, hf_config, layout.pgs)
        (chunk,) = model.chunks
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": layout.pgs.dp_cp, "singleton_local_shards": False})
    apply_factories(state)
    stored = list(nested_values(state))
    regions: dict[int, list[Region]] = {}
    for item in stored:
        if isinstance(item, ShardedTensor):
            regions.setdefault(_storage(item.data), []).append(_region(item))
    objects = tuple(item.unique_key for item in stored if isinstance(item, ShardedObject))
    return Skeleton(binding, _entries(binding.bound, regions), objects)


def _region(item: ShardedTensor) -> Region:
    view = item.data
    assert view is not None
    sizes = (1,) * item.prepend_axis_num + tuple(view.shape)
    start = int(view.storage_offset())
    return Region(item.key, item.global_shape, item.global_offset, sizes, tuple(view.shape), view.stride(), start)


def _storage(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage()._cdata  # the same for all views


def _entries(bound: Sequence[Bound], regions: Mapping[int, list[Region]]) -> tuple[Entry, ...]:
    entries, wrong = [], []
    for one in bound:
        found = regions.get(_storage(one.parameter), [])
        if one.is_copy and not found:  # Megatron stores a tied output layer as the embedding
            continue
        if sum(torch.Size(region.shape).numel() for region in found) != one.parameter.numel():
            wrong.append(one.name)
        entries.append(Entry(one, tuple(found), one.parameter.dtype == torch.float32))
    held = {_storage(one.parameter) for one in bound}
    wrong += [region.key for storage, found in regions.items() if storage not in held for region in found]
    if wrong:
        raise ValueError(f"parameters that a Megatron checkpoint does not store exactly once: {listing(wrong)}")
    return tuple(entries)
