"""reasoning-gym's procedural data sets as task generators: `data.source: reasoning_gym:number_sorting`."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_gspo.data.prompt import Prompt

PREFIX = "reasoning_gym:"
SEEDS = 2**32  # some data sets seed numpy's legacy generator, which takes 32 bits


def gym_task(name: str, seed: int, args: Mapping[str, Any]) -> Callable[[int], Prompt]:
    """The data set `name`, configured by `args`; `meta` holds what the reward `reasoning_gym` needs.

    reasoning-gym makes an entry from the sum of seed and index, so that neighbouring seeds would share nearly all
    entries: its index is a hash of ours and of `seed` instead. Raises ValueError for an unknown data set, or arguments
    that it refuses.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError(
            f"data.source = '{PREFIX}{name}' needs reasoning-gym: pip install 'megatron-gspo[tasks]'"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        hint = f"try {', '.join(near)}" if near else f"`reasoning_gym.factory.DATASETS` names its {len(DATASETS)}"
        raise ValueError(f"data.source = '{PREFIX}{name}': reasoning-gym has no such data set; {hint}")
    try:
        dataset = reasoning_gym.create_dataset(name, seed=0, size=SEEDS, **args)
    except (TypeError, ValueError, AssertionError) as error:  # its configurations validate by assert
        raise ValueError(f"data.args = {dict(args)}: the data set '{name}' refuses them: {error}") from None

    def make(index: int) -> Prompt:
        entry = dataset[_scatter(seed, index)]
        return Prompt(
            id=f"{name}/{index}",
            prompt=entry["question"],
            response=entry["answer"],
            meta={"dataset": name, "entry": entry},
        )

    return make


def _scatter(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest)
