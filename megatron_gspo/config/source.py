"""Where a recipe's keys were set: file and line, or the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True)
class Source:
    """`file` as the user wrote it, or "command line"; `line` counts from 1."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


# From a dotted key to the place that set it. The empty key is the recipe itself.
Sources = Mapping[str, Source]


def locate(text: str, file: str) -> dict[str, Source]:
    """Dotted key -> the line of `text` (YAML that parses) that holds the key. Items of a list are not told apart."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return {"": Source(file), **{name: Source(file, line) for name, line in _lines(root, "")}}


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    # Keys that YAML's merge `<<` brings in come first, as the mapping's own keys win wherever they stand.
    for name, child in node.value:
        if name.value == "<<":
            for merged in child.value if isinstance(child, yaml.SequenceNode) else [child]:
                yield from _lines(merged, prefix)
    for name, child in node.value:
        if name.value != "<<":
            path = join(prefix, name.value)
            yield path, name.start_mark.line + 1
            yield from _lines(child, path)


def join(prefix: str, name: Any) -> str:
    """The dotted key of `name` inside the section `prefix`; the root's prefix is empty."""
    return f"{prefix}.{name}" if prefix else str(name)


def is_set(sources: Sources, name: str) -> bool:
    """Whether the dotted key `name`, or a key inside the section `name`, was set by anyone."""
    return name in sources or any(other.startswith(f"{name}.") for other in sources)


def nearest(sources: Sources, name: str) -> Source | None:
    """The place that set `name` or a key inside it, or else the section around it, or else the recipe.

    A key inside that the command line set comes before the section's place in a file: it was laid over that.
    """
    while name:
        inside = [source for other, source in sources.items() if other.startswith(f"{name}.")]
        overrides = [source for source in inside if source.line is None]
        if overrides or (inside and name not in sources):
            return (overrides or inside)[0]
        if name in sources:
            return sources[name]
        name = name.rpartition(".")[0]
    return sources.get(name)
