"""The one-way import rule: cli -> loop -> rollout, policy, reward, data -> weights, batch, objective -> config."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_gspo"
TIERS = (
    {"__main__"},
    {"cli"},
    {"loop", "preflight", "convert"},
    {"rollout", "policy", "reward", "data", "observe"},
    {"weights", "batch", "objective"},
    {"config"},
)
GPU_ONLY = {"transformer_engine", "apex", "sglang"}


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module of the package."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


def imports(tree: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """Dotted names that `tree` imports at run time; a name imported from a module comes as module.name too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"relative import in line {node.lineno}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, inside_functions=inside_functions)


def package_of(module: str) -> str:
    """`policy` for megatron_gspo.policy.model; empty for megatron_gspo itself."""
    return ".".join(module.split(".")[1:2])


def tier_of(package: str) -> int:
    tier = next((number for number, packages in enumerate(TIERS) if package in packages), None)
    assert tier is not None, (
        f"megatron_gspo.{package} has no place in the import rule: name it in DESIGN.md and in TIERS"
    )
    return tier


def test_imports_run_one_way():
    offences = []
    for module, tree in modules().items():
        for target in imports(tree, inside_functions=True):
            here, there = package_of(module), package_of(target)
            if not target.startswith("megatron_gspo.") or not here or here == there:
                continue
            if tier_of(there) <= tier_of(here):
                offences.append(f"{module} imports {target}")
    assert offences == []


def test_modules_form_no_circle():
    trees = modules()
    graph = {
        # A package's __init__ imports its modules from itself, which is no circle.
        module: (set(imports(tree, inside_functions=True)) & trees.keys()) - {module}
        for module, tree in trees.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"circle of imports: {' <- '.join(error.args[1])}") from error


def third_parties(package: str) -> set[str]:
    """Top-level names that `package` imports from neither the standard library nor ours."""
    found = set()
    for module, tree in modules().items():
        if package_of(module) == package:
            found |= {target.partition(".")[0] for target in imports(tree, inside_functions=True)}
    return found - sys.stdlib_module_names - {"megatron_gspo"}


def test_config_imports_only_omegaconf_and_yaml():
    assert third_parties("config") <= {"omegaconf", "yaml"}


def test_objective_imports_only_torch_and_nothing_of_ours():
    assert third_parties("objective") <= {"torch"}
    for module, tree in modules().items():
        if package_of(module) == "objective":
            ours = {target for target in imports(tree, inside_functions=True) if target.startswith("megatron_gspo")}
            assert {package_of(target) for target in ours} <= {"objective"}, module


def test_gpu_only_packages_are_imported_inside_functions():
    offences = [
        f"{module} imports {target}"
        for module, tree in modules().items()
        for target in imports(tree, inside_functions=False)
        if target.partition(".")[0] in GPU_ONLY
    ]
    assert offences == []


def test_the_rule_sees_imports_inside_functions_and_skips_those_for_types_only():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import apex\n"
        "def f():\n    from megatron_gspo.loop import launch\n"
    )
    assert set(imports(tree, inside_functions=False)) == {"typing", "typing.TYPE_CHECKING"}
    assert "megatron_gspo.loop.launch" in set(imports(tree, inside_functions=True))
