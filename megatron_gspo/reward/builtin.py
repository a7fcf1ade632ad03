"""Verifiable rewards that come with the project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gspo.reward.registry import register_reward


@register_reward("sort_digits")
def sort_digits(*, prompt: str, response: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Half for the share of digits that stand where they belong, half for the exact answer; in [0, 1]."""
    answer = meta["answer"]
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False)) / len(answer)
    exact = float(response == answer)
    return {"reward": 0.5 * right + 0.5 * exact, "exact": exact}


@register_reward("exact_match")
def exact_match(*, prompt: str, response: str, meta: Mapping[str, Any], key: str = "answer") -> dict[str, float]:
    """1 if the response is `meta[key]`, white space around either aside, else 0."""
    exact = float(response.strip() == str(meta[key]).strip())
    return {"reward": exact, "exact": exact}


@register_reward("reasoning_gym")
def reasoning_gym(*, prompt: str, response: str, meta: Mapping[str, Any], tag: str | None = None) -> dict[str, float]:
    """The score that reasoning-gym gives to the answer, in [0, 1]; for prompts of `data.source: reasoning_gym:DATASET`.

    The answer is the whole response, or with `tag` what stands in its last <tag>...</tag>; none there scores 0.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    answer = response.strip() if tag is None else extract_answer(response, tag_name=tag)
    score = float(get_score_answer_fn(meta["dataset"])(answer=answer, entry=meta["entry"]))
    return {"reward": score, "exact": float(score == 1.0)}
