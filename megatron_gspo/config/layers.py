"""What a recipe is made of before any types: its chain of `base:` files and the overrides, laid over one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_gspo.config.problem import Problem, RecipeError, complaint, suggest
from megatron_gspo.config.source import Source, Sources, join, locate
from megatron_gspo.config.variants import SELECTORS

COMMAND_LINE = Source("command line")


@dataclass(frozen=True)
class Layer:
    """Untyped values of one file or one override (interpolations not yet resolved) and where each was set."""

    values: dict[str, Any]
    sources: Sources


def file_layers(path: Path, above: Sequence[Path] = ()) -> list[Layer]:
    """The layers of the recipe at `path`, the lowest base first. `above` are the files that led here by `base:`."""
    layer = _read(path)
    base = layer.values.pop("base", None)
    if base is None:
        return [layer]
    problem = _refuse_base(base, path, [*above, path])
    if problem:
        raise RecipeError([problem], layer.sources)
    return [*file_layers(path.parent / base, [*above, path]), layer]


def override_layer(overrides: Sequence[str]) -> Layer:
    """The one layer of all command-line overrides such as `objective.clip_high=4e-4`; their values are read as YAML.

    Later words win, and it does not matter on which side of `objective.name` its keys stand.
    """
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for override in overrides:
        word = _override(override)
        values, sources = _merge(values, word.values), {**sources, **word.sources}
    return Layer(values, sources)


def _override(override: str) -> Layer:
    path, equals, text = override.partition("=")
    names = path.split(".")
    if not equals or not all(names):
        reason = "an override is KEY=VALUE, e.g. objective.clip_high=4e-4"
        raise RecipeError([Problem(key=repr(override), reason=reason)], {"": COMMAND_LINE})
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = Problem(key=path, value=text, reason=f"not a YAML value: {complaint(error)}")
        raise RecipeError([problem], {path: COMMAND_LINE}) from error
    values = parsed["value"]
    sources = {name: COMMAND_LINE for name in _flatten(values, path)}
    for name in reversed(names):
        values = {name: values}
    return Layer(values, sources)


def merge(layers: Sequence[Layer]) -> Layer:
    """Later layers win. Mappings are merged key by key; anything else, lists and null included, is replaced whole.

    An empty mapping empties the one below. A layer that names another objective or advantage estimator replaces the
    whole section: the keys below belong to one that is no longer there.
    """
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for layer in layers:
        for section in _other_variants(values, layer.values):
            values = values | {section: {}}
            sources = {name: where for name, where in sources.items() if not name.startswith(f"{section}.")}
        values = _merge(values, layer.values)
        for name, source in layer.sources.items():
            if name and (not isinstance(_get(values, name), dict) or not _get(values, name)):
                sources = {old: where for old, where in sources.items() if not old.startswith(f"{name}.")}
            sources[name] = source
    return Layer(values, sources)


def _read(path: Path) -> Layer:
    text = _text(path)
    try:
        config = OmegaConf.create(text)
        sources = locate(text, str(path))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        source = Source(str(path), mark.line + 1 if mark else None)
        raise RecipeError([Problem(key="YAML", reason=complaint(error))], {"": source}) from error
    if not isinstance(config, DictConfig):
        raise RecipeError([Problem(key="YAML", reason="a recipe is a mapping of sections")], sources)
    values: Any = OmegaConf.to_container(config)
    return Layer(values, sources)


def _text(path: Path) -> str:
    reason, hint = "", ""
    if path.is_dir():
        reason, recipes = "this is a directory, not a recipe", sorted(str(other) for other in path.glob("*.yaml"))
        hint = f"a recipe in it: {', '.join(recipes[:5])}" if recipes else ""
    elif not path.exists():
        reason, hint = "no such file", suggest(path, sorted(str(other) for other in path.parent.glob("*.yaml")))
    else:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}"
            hint = "save the recipe as UTF-8"
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
    raise RecipeError([Problem(key=str(path), reason=reason, hint=hint)], {})


def _refuse_base(base: Any, path: Path, chain: Sequence[Path]) -> Problem | None:
    if not isinstance(base, str):
        return Problem(key="base", value=base, reason="expected the path of another recipe, relative to this one")
    target = path.parent / base
    if not target.is_file():
        hint = suggest(base, sorted(other.name for other in path.parent.glob("*.yaml")))
        return Problem(key="base", value=base, reason=f"no such file: {target}", hint=hint)
    if target.resolve() in [link.resolve() for link in chain]:
        cycle = " -> ".join(map(str, [*chain, target]))
        return Problem(key="base", value=base, reason=f"bases form a cycle: {cycle}")
    return None


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if value and isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _other_variants(below: Mapping[str, Any], above: Mapping[str, Any]) -> Iterator[str]:
    """Sections for which `above` selects another variant than `below`."""
    for section, selector in SELECTORS.items():
        old, new = below.get(section), above.get(section)
        if (
            isinstance(old, dict)
            and isinstance(new, dict)
            and new.get(selector, old.get(selector)) != old.get(selector)
        ):
            yield section


def _get(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _flatten(value: Any, prefix: str) -> Iterator[str]:
    yield prefix
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _flatten(child, join(prefix, name))
