"""Every policy objective bound to numbers, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_gspo.objective import (
    Objective,
    cispo,
    clipped_tokens,
    dppo,
    gmpo,
    gspo_token,
    minirl,
    sapo,
    vespo,
)


@dataclass(frozen=True)
class Member:
    """An objective of the family: its function and aggregation.

    without_std: its advantages lack the std. token_advantages: they may differ along a response.
    """

    objective: Objective
    aggregation: str
    without_std: bool = False
    token_advantages: bool = True


def oracle_member(name: str, hp: dict[str, float]) -> Member:
    """The objective that the oracle calls `name`, with the numbers of a case's `hp`."""
    return ORACLE[name](hp)


def _gspo(hp: dict[str, float]) -> Member:
    clip = {"clip_low": hp["gspo_eps_low"], "clip_high": hp["gspo_eps_high"]}
    return Member(partial(gspo_token, **clip), "sequence_mean")


def _clipped(
    aggregation: str, high: str = "eps_low", without_std: bool = False
) -> Callable[[dict[str, float]], Member]:
    return lambda hp: Member(
        partial(clipped_tokens, clip_low=hp["eps_low"], clip_high=hp[high]), aggregation, without_std
    )


ORACLE: dict[str, Callable[[dict[str, float]], Member]] = {
    "gspo": _gspo,
    "gspo_token": _gspo,
    "grpo": _clipped("sequence_mean"),
    "dapo": _clipped("token_mean", "dapo_eps_high"),
    "dr_grpo": _clipped("constant", without_std=True),
    "sapo": lambda hp: Member(partial(sapo, tau_pos=hp["tau_pos"], tau_neg=hp["tau_neg"]), "sequence_mean"),
    "cispo": lambda hp: Member(partial(cispo, clip_high=hp["cispo_eps_high"]), "token_mean"),
    "gmpo": lambda hp: Member(partial(gmpo, clip_low=hp["gmpo_eps"], clip_high=hp["gmpo_eps"]), "sequence_mean"),
}

# Narrow trust regions, so that small test data clips some tokens under each of them.
_GSPO = partial(gspo_token, clip_low=0.02, clip_high=0.03)
FAMILY: dict[str, Member] = {
    "gspo": Member(_GSPO, "sequence_mean", token_advantages=False),
    "gspo_token": Member(_GSPO, "sequence_mean"),
    "grpo": Member(partial(clipped_tokens, clip_low=0.1, clip_high=0.1), "sequence_mean"),
    "dapo": Member(partial(clipped_tokens, clip_low=0.1, clip_high=0.15), "token_mean"),
    "dr_grpo": Member(partial(clipped_tokens, clip_low=0.12, clip_high=0.1), "constant", without_std=True),
    "sapo": Member(partial(sapo, tau_pos=1.0, tau_neg=1.05), "sequence_mean"),
    "cispo": Member(partial(cispo, clip_high=0.1), "token_mean"),
    "gmpo": Member(partial(gmpo, clip_low=0.1, clip_high=0.15), "sequence_mean", token_advantages=False),
    "vespo": Member(
        partial(vespo, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0), "token_mean", token_advantages=False
    ),
    "dppo_tv": Member(partial(dppo, divergence="tv", threshold=0.05, max_ratio=1.1), "token_mean"),
    "dppo_kl": Member(partial(dppo, divergence="kl", threshold=0.005, max_ratio=1.1), "token_mean"),
    "minirl": Member(partial(minirl, clip_low=0.1, clip_high=0.15, max_weight=1.2), "sequence_sum"),
}
