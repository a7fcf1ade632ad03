"""A recipe may set any field of Megatron's configuration dataclasses: checked to exist, to be free, and to fit."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch


def checked_overrides(cls: type, overrides: Mapping[str, Any], derived: Mapping[str, str], key: str) -> dict[str, Any]:
    """`overrides` as keyword arguments for the dataclass `cls`, with enums and torch dtypes resolved from their names.

    `derived` maps fields that our code sets to the reason; `key` is where the overrides stand in the recipe.
    Raises ValueError for a field that does not exist, that is derived, or whose type the value does not have.
    """
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    resolved = {}
    for name, value in overrides.items():
        where = f"{key}.{name}"
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"see the fields of {cls.__module__}.{cls.__name__}"
            raise ValueError(f"{where}: Megatron's {cls.__name__} has no such field; {hint}")
        if name in derived:
            raise ValueError(f"{where}: is not free, {derived[name]}")
        resolved[name] = _resolve(hints[name], value, where)
    return resolved


def _resolve(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`. Types that a recipe cannot be checked against (containers, Any) pass as they are."""
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in alternatives:
        return None
    for kind in alternatives:
        if isinstance(kind, enum.EnumMeta) and value in kind.__members__:
            return kind[value]
        if kind is torch.dtype and isinstance(getattr(torch, str(value), None), torch.dtype):
            return getattr(torch, value)
        if _fits(kind, value):
            return float(value) if kind is float else value
    expected = " | ".join(_describe(kind) for kind in alternatives)
    raise ValueError(f"{where}: expected {expected}, got {value!r}")


def _fits(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(kind, enum.EnumMeta) or kind in (torch.dtype, type(None)):
        return False
    return typing.get_origin(kind) is not Callable and not callable(value)


def _describe(kind: Any) -> str:
    if isinstance(kind, enum.EnumMeta):
        return f"one of {sorted(kind.__members__)}"
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {list(typing.get_args(kind))}"
    return getattr(kind, "__name__", str(kind)) if kind is not type(None) else "null"
