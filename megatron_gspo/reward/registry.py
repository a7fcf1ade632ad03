"""From `reward.name` to a function: a registered one, or a user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

RewardFunction = Callable[..., Any]
"""`fn(*, prompt, response: str, meta: dict, **args) -> float | {"reward": float, further metrics}`, sync or async.

`prompt` is what the data gives (a string, or chat messages), `response` the text without special tokens, `meta` the
other fields of the data, `args` those of `reward.args`."""

REWARDS: dict[str, RewardFunction] = {}


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorates a reward function so that `reward.name: name` finds it."""

    def register(function: RewardFunction) -> RewardFunction:
        assert name not in REWARDS, f"reward '{name}' is registered twice"
        REWARDS[name] = function
        return function

    return register


def find_reward(name: str, args: Mapping[str, Any]) -> RewardFunction:
    """The function that `name` means. Raises ValueError where it does not exist or cannot be called with `args`."""
    function = _import(name) if ":" in name else _registered(name)
    if not callable(function):
        raise ValueError(f"reward.name = '{name}': expected a function, got {type(function).__name__}")
    try:
        inspect.signature(function).bind(prompt="", response="", meta={}, **args)
    except TypeError as error:
        raise ValueError(
            f"reward.name = '{name}': it is called with the keywords prompt, response, meta and those of reward.args = "
            f"{dict(args)}, but its signature is {inspect.signature(function)}: {error}"
        ) from None
    return function


def _registered(name: str) -> RewardFunction:
    if name not in REWARDS:
        close = difflib.get_close_matches(name, REWARDS, n=1) or sorted(REWARDS)
        raise ValueError(
            f"reward.name = '{name}': no such reward; try {', '.join(close)}, or your own function as 'module:function'"
        )
    return REWARDS[name]


def _import(name: str) -> Any:
    module_name, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise ValueError(
            f"reward.name = '{name}': no module '{error.name}' on the Python path; install it, or add its folder to "
            "PYTHONPATH"
        ) from None
    for part in path.split("."):
        if not hasattr(target, part):
            functions = [each for each, value in vars(target).items() if callable(value) and not each.startswith("_")]
            close = difflib.get_close_matches(part, functions, n=1) or functions
            raise ValueError(
                f"reward.name = '{name}': '{module_name}' has no '{part}'; it has {', '.join(close) or 'no functions'}"
            )
        target = getattr(target, part)
    return target
