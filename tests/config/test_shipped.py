"""Every recipe of this repository loads, and says by its formula what it optimises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gspo.config import load_recipe, objective_formula, validate

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_it_loads(path):
    recipe = load_recipe(path)
    validate(recipe, recipe.run.workers)
    assert objective_formula(recipe)


def test_there_are_some():
    assert {path.name for path in RECIPES} >= {"demo_sort.yaml", "demo_sort_sft.yaml"}


def test_compared_recipes_differ_in_their_objective_alone():
    first, *others = (load_recipe(path) for path in RECIPES if path.parent.name == "compare")
    assert len(others) == 2
    for other in others:
        assert replace(other, objective=first.objective, run=replace(other.run, dir=first.run.dir)) == first
