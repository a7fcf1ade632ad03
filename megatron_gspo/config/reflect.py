"""Questions to the schema's dataclasses: which keys a section has, of what type, with what default."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from megatron_gspo.config.key import Bounds
from megatron_gspo.config.schema import Recipe
from megatron_gspo.config.source import join
from megatron_gspo.config.variants import VARIANTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section. `default` is MISSING where the recipe must set it."""

    name: str
    hint: Any
    default: Any
    doc: str
    bounds: Bounds

    @property
    def section(self) -> type | None:
        """The section's class where this key holds one, else None."""
        return next((option for option in _options(self.hint) if _is_section(option)), None)

    @property
    def optional(self) -> bool:
        return type(None) in _options(self.hint)

    @property
    def choices(self) -> list[str]:
        """The values of an enumerated key; empty for all others."""
        return [member.value for option in _options(self.hint) if _is_enum(option) for member in option]

    @property
    def type_name(self) -> str:
        """The type in words, e.g. `int`, `float or null`, `constant | linear | cosine`, `list of str`."""
        return " or ".join(_type_name(option) for option in _options(self.hint))


def keys(section: type) -> dict[str, Key]:
    """The keys of a section's class by name, in the order of the schema."""
    hints = typing.get_type_hints(section)
    return {
        field.name: Key(
            name=field.name,
            hint=hints[field.name],
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            doc=field.metadata["doc"],
            bounds=field.metadata["bounds"],
        )
        for field in dataclasses.fields(section)
        if "doc" in field.metadata
    }


def walk(section: type = Recipe, prefix: str = "") -> Iterator[tuple[str, Key, type]]:
    """(dotted key, key, class of its section) of every key that any recipe may set, sections before their keys.

    A section with variants has the keys of all of them, each with the first class that holds it.
    """
    for key in keys(section).values():
        path = join(prefix, key.name)
        yield path, key, section
        if key.section is not None:
            yield from walk(key.section, path)
    if section in VARIANTS:
        shared = keys(section)
        for variant in VARIANTS[section].classes.values():
            for key in keys(variant).values():
                if key.name not in shared:
                    path = join(prefix, key.name)
                    yield path, key, variant
                    if key.section is not None:
                        yield from walk(key.section, path)


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Key, Any]]:
    """(dotted key, key, value) of every key that holds no section in an instance of a section's class."""
    for key in keys(type(section)).values():
        path, value = join(prefix, key.name), getattr(section, key.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, path)
        else:
            yield path, key, value


def value_at(recipe: Recipe, path: str) -> Any:
    """The value of the dotted key `path`."""
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if _is_enum(hint):
        return " | ".join(member.value for member in hint)
    if _is_section(hint):
        return "section"
    if typing.get_origin(hint) is list:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "mapping of str"
    return hint.__name__
