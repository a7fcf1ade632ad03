"""The documentation of every key that a recipe may set, from the schema itself."""

from __future__ import annotations

import textwrap

from omegaconf import MISSING

from megatron_gspo.config.problem import Problem, RecipeError, show, suggest
from megatron_gspo.config.reflect import Key, keys, walk
from megatron_gspo.config.variants import VARIANTS, variants_of


def document_keys(section: str = "") -> str:
    """Type, default, bounds and meaning of the keys under the dotted `section`, or of all keys.

    Raises RecipeError where nothing is called `section`.
    """
    found = {}
    for path, key, owner in walk():
        if not section or path == section or path.startswith(f"{section}."):
            found[path, owner] = _entry(path, key, owner)
    if not found:
        paths = dict.fromkeys(path for path, _, _ in walk())
        sections = dict.fromkeys(path for path, key, _ in walk() if key.section is not None)
        hint = suggest(section, paths) or f"sections: {', '.join(sections)}"
        raise RecipeError([Problem(key=section, reason="no such key or section", hint=hint)], {})
    return "\n".join(found.values()).lstrip() + "\n"


def _entry(path: str, key: Key, owner: type) -> str:
    if key.section is not None:
        head = f"\n{path}: section{', or null' if key.optional else ''}"
        return f"{head}\n{_indent(_first_paragraph(key.section))}"
    default = "required" if key.default == MISSING else f"= {show(key.default)}"
    variants = variants_of(owner)
    selects = owner in VARIANTS and variants and key.name == variants.selector
    kind = " | ".join(variants.classes) if variants and selects else key.type_name
    only = f" ({variants.what} {keys(owner)[variants.selector].default})" if variants and not selects else ""
    bounds = f", {key.bounds}" if str(key.bounds) else ""
    return f"{path}: {kind}{bounds} {default}{only}\n{_indent(key.doc)}"


def _first_paragraph(section: type) -> str:
    return (section.__doc__ or "").partition("\n\n")[0]


def _indent(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=100, initial_indent="    ", subsequent_indent="    ")
