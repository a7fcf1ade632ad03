"""From a recipe file and overrides to a typed, checked, immutable `Recipe`."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_gspo.config.layers import file_layers, merge, override_layer
from megatron_gspo.config.objectives import OBJECTIVES
from megatron_gspo.config.problem import Problem, RecipeError, complaint, suggest
from megatron_gspo.config.reflect import Key, keys, walk
from megatron_gspo.config.schema import Recipe
from megatron_gspo.config.source import join
from megatron_gspo.config.validate import validate
from megatron_gspo.config.variants import SELECTORS, VARIANTS, variants_of


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path`, laid over its `base:` chain, with dot-list `overrides` such as `batch.prompts=64` on top.

    Raises RecipeError with every problem found, each with its key, file and line. What depends on the number of ranks
    is not checked here, as a recipe does not know it: see `validate`.
    """
    layer = merge([*file_layers(Path(path)), override_layer(overrides)])
    config = OmegaConf.structured(Recipe)
    problems = list(_fill(config, Recipe, _with_objective_defaults(layer.values), ""))
    try:
        problems += _missing(config, [problem.key for problem in problems])
        recipe = None if problems else cast(Recipe, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere, or to a value of another type
        problems.append(_unresolved(error, layer.values))
    if problems or recipe is None:
        raise RecipeError(problems, layer.sources)
    recipe = dataclasses.replace(recipe, sources=layer.sources)
    validate(recipe)
    return recipe


def _unresolved(error: OmegaConfBaseException, values: dict[str, Any]) -> Problem:
    """An interpolation that leads nowhere, or to a value of another type: what was written, and what it may mean."""
    path = error.full_key or "recipe"
    key = next((key for other, key, _ in walk() if other == path), None)
    missing = re.search(r"Interpolation key '([^']+)' not found", str(error))
    hint = suggest(missing[1], dict.fromkeys(other for other, _, _ in walk())) if missing else ""
    if not missing and key:
        hint = f"{path} takes {key.type_name}"
    value: Any = values
    for name in path.split("."):
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return Problem(key=path, value=value, reason=complaint(error), hint=hint)


def _with_objective_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """`values` over what their objective has in other sections. A section that is set to null stays away."""
    objective = values.get("objective")
    chosen = OBJECTIVES.get(str(objective.get("name"))) if isinstance(objective, dict) else None
    filled = dict(values)
    for section, below in (chosen.defaults if chosen else {}).items():
        above, selector = values.get(section, {}), SELECTORS.get(section)
        if isinstance(above, dict):
            same = selector is None or above.get(selector, below[selector]) == below[selector]
            filled[section] = {**below, **above} if same else above
    return filled


def _fill(node: DictConfig, section: type, values: dict[str, Any], prefix: str) -> Iterator[Problem]:
    """Set `values` in the structured `node` of class `section`; yields what it refuses."""
    OmegaConf.set_readonly(node, False)  # frozen dataclasses start read-only
    valid = keys(section)
    for name, value in values.items():
        path = join(prefix, name)
        if name not in valid:
            yield _unknown(path, str(name), section, prefix, value)
        elif valid[name].section is None or (value is None and valid[name].optional):
            yield from _set(node, valid[name], value, path)
        elif not isinstance(value, dict):
            yield Problem(key=path, value=value, reason="expected a section (a mapping of keys)")
        else:
            yield from _fill_section(node, valid[name], value, path)


def _fill_section(node: DictConfig, key: Key, values: dict[str, Any], path: str) -> Iterator[Problem]:
    section = cast(type, key.section)
    variants = VARIANTS.get(section)
    if variants:
        chosen = values.get(variants.selector)
        if variants.selector in values and (not isinstance(chosen, str) or chosen not in variants.classes):
            reason, hint = f"no such {variants.what}", suggest(chosen, variants.classes)
            yield Problem(key=f"{path}.{variants.selector}", value=chosen, reason=reason, hint=hint)
            return
        section = variants.classes[chosen] if chosen else variants.default or section
    node[key.name] = section()
    yield from _fill(node[key.name], section, values, path)


def _set(node: DictConfig, key: Key, value: Any, path: str) -> Iterator[Problem]:
    # OmegaConf turns any scalar into a string, and 007 or 1.10 would not survive that.
    if bool in (key.hint, *get_args(key.hint)) and not isinstance(value, bool) and not _is_interpolation(value):
        yield Problem(key=path, value=value, reason=f"expected {key.type_name}", hint="valid: true, false")
        return
    if key.hint in (str, str | None) and not isinstance(value, str | None):
        hint = "" if isinstance(value, list | dict) else "quote it if it is meant as text"
        yield Problem(key=path, value=value, reason=f"expected {key.type_name}", hint=hint)
        return
    try:
        node[key.name] = value
    except OmegaConfBaseException:
        hint = suggest(value, key.choices) if key.choices else ""
        yield Problem(key=path, value=value, reason=f"expected {key.type_name}", hint=hint)


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _unknown(path: str, name: str, section: type, prefix: str, value: Any) -> Problem:
    valid = keys(section)
    elsewhere = [other for other, key, _ in walk() if key.name == name and key.section is None]
    variants = variants_of(section)
    if section in VARIANTS:
        selector = f"{prefix}.{VARIANTS[section].selector}"
        return Problem(key=path, value=value, reason=f"{selector} is not set, and decides which keys there are")
    if variants and path in elsewhere:
        reason = f"the {variants.what} '{valid[variants.selector].default}' does not use this key"
        return Problem(key=path, value=value, reason=reason, hint=f"its keys: {', '.join(valid)}")
    close = difflib.get_close_matches(name, valid, n=1)
    if elsewhere:
        hint = f"did you mean {' or '.join(elsewhere)}?"
    elif close:
        hint = f"did you mean {join(prefix, close[0])}?"
    else:
        hint = f"valid: {', '.join(valid)}"
    return Problem(key=path, value=value, reason="no such key", hint=hint)


def _missing(config: DictConfig, refused: Sequence[str]) -> Iterator[Problem]:
    docs = {path: key.doc for path, key, _ in walk()}
    docs["objective.name"] = f"valid: {', '.join(OBJECTIVES)}"
    for path in sorted(OmegaConf.missing_keys(config)):
        if not any(path == other or path.startswith(f"{other}.") for other in refused):
            yield Problem(key=path, reason="required, but not set", hint=docs[path])
