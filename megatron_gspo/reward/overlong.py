"""Soft punishment of long responses (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """0 up to max_tokens - buffer response tokens, then linearly down to -1 at max_tokens, and -1 beyond."""
    beyond = length - (max_tokens - buffer)
    return -min(max(beyond / buffer, 0.0), 1.0)
