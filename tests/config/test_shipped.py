"""Every recipe of this repository loads, and says by its formula what it optimises."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config import load_recipe, objective_formula, validate

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_it_loads(path):
    recipe = load_recipe(path)
    validate(recipe, recipe.run.workers)
    assert objective_formula(recipe)


def test_there_are_some():
    assert {path.name for path in RECIPES} >= {"demo_sort.yaml", "demo_sort_sft.yaml"}
