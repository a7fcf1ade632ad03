"""The documentation of every key that a recipe may set, from the schema itself."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from omegaconf import MISSING

from megatron_gspo.config.problem import Problem, RecipeError, show, suggest
from megatron_gspo.config.reflect import Key, walk
from megatron_gspo.config.variants import VARIANTS, variants_of


def document_keys(section: str = "") -> str:
    """Type, default, bounds and meaning of the keys under the dotted `section`, or of all keys.

    Raises RecipeError where nothing is called `section`.
    """
    found: dict[tuple[str, str], list[type]] = {}
    for path, key, owner in walk():
        if not section or path == section or path.startswith(f"{section}."):
            found.setdefault(_entry(path, key, owner), []).append(owner)
    if not found:
        raise RecipeError([Problem(key=section, reason="no such key or section", hint=_nearest(section))], {})
    lines = [f"{head}{_only(owners)}\n{meaning}" for (head, meaning), owners in found.items()]
    return "\n".join(lines).lstrip() + "\n"


def _entry(path: str, key: Key, owner: type) -> tuple[str, str]:
    """The key with its type and default, and what it means; the same for variants of a section that share it."""
    if key.section is not None:
        head = f"\n{path}: section{', or null' if key.optional else ''}"
        return head, _indent(_first_paragraph(key.section))
    default = "required" if key.default == MISSING else f"= {show(key.default)}"
    variants = variants_of(owner)
    selects = owner in VARIANTS and variants and key.name == variants.selector
    kind = " | ".join(variants.classes) if variants and selects else key.type_name
    bounds = f", {key.bounds}" if str(key.bounds) else ""
    return f"{path}: {kind}{bounds} {default}", _indent(key.doc)


def _only(owners: Sequence[type]) -> str:
    """Which variants of its section a key is of; empty where it is of all."""
    variants = variants_of(owners[0])
    if variants is None or owners[0] in VARIANTS:
        return ""
    names = [name for name, member in variants.classes.items() if member in owners]
    others = [name for name in variants.classes if name not in names]
    if len(others) < len(names):
        return f" (not {', '.join(others)})" if others else ""
    return f" ({variants.what} {', '.join(names)})"


def _nearest(section: str) -> str:
    """A hint for what is no key or section."""
    paths = {path: key for path, key, _ in walk()}
    parent, _, name = section.rpartition(".")
    holder = paths[parent].section if parent in paths else None
    variants = VARIANTS.get(holder) if holder else None
    if variants and name in variants.classes:
        return f"{name} is a value of {parent}.{variants.selector}; its keys are among those of {parent}"
    sections = [path for path, key in paths.items() if key.section is not None]
    return suggest(section, paths) or f"sections: {', '.join(sections)}"


def _first_paragraph(section: type) -> str:
    return (section.__doc__ or "").partition("\n\n")[0]


def _indent(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=100, initial_indent="    ", subsequent_indent="    ")
