"""One packing plan per rollout batch: mini-batches, then micro-batches for every DP rank, from lengths alone.

The plan is a pure function of its arguments, so every rank computes the same one and nothing is exchanged. Two things
cost time: all micro-batches of a mini-batch have one padded length, that of the fullest; and ranks wait for each other
in every micro-batch (experts spread over DP), so those that run together should cost the same FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_gspo.batch.shard import document_multiple

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Weights of an imbalance in attention against one in tokens: placing settles attention, levelling then settles tokens.
_PLACE_WEIGHT, _LEVEL_WEIGHT = 10.0, 0.02
_LEVEL_TOLERANCE = 0.002  # the fullest micro-batch may exceed the mean by this share
_MAX_SWAPS, _MAX_LEAVING = 1000, 64  # swaps per mini-batch and choices for each: planning stays well under a second


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step. rows: its row numbers, ascending. micro_batches[dp_rank][k]: row numbers, maybe none.

    padded_length: tokens of each micro-batch, padding included, over all CP ranks.
    """

    rows: tuple[int, ...]
    padded_length: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Plan:
    """How a rollout batch is trained, mini-batch after mini-batch."""

    mini_batches: tuple[MiniBatch, ...]


def plan_batch(
    lens: Sequence[int] | Tensor,
    group: Sequence[int] | Tensor,
    *,
    mini_batches: int,
    dp: int,
    max_tokens: int,
    cp: int,
    length_multiple: int,
    micro_batch_multiple: int = 1,
    attention_cost: float,
) -> Plan:
    """Cut n sequences into mini-batches of whole groups, and each of them into dp x m micro-batches.

    lens [n]: tokens, prompt included. group [n]: prompt of each sequence; mini-batches take equal numbers of them, in
    order of first appearance. max_tokens bounds the padded tokens of a micro-batch, over all CP ranks; m is the
    smallest multiple of `micro_batch_multiple` (the pipeline schedule's) for which a packing within it was found.
    length_multiple: what padded lengths are multiples of (sequence and context parallelism, FP8 blocks).
    attention_cost: FLOPs of a sequence of L tokens are L + attention_cost L^2, in units of one token elsewhere.
    Raises ValueError if groups do not divide into `mini_batches`, or a sequence does not fit into max_tokens.
    """
    multiple = document_multiple(cp)
    if length_multiple % multiple:
        raise ValueError(f"length_multiple {length_multiple} must be a multiple of 2 x cp = {multiple}")
    capacity = max_tokens // length_multiple * length_multiple
    tokens = _round_up(np.asarray(lens, dtype=np.int64), multiple)
    if tokens.size and tokens.max() > capacity:
        row = int(tokens.argmax())
        raise ValueError(
            f"batch.max_tokens is {max_tokens}, room for {capacity} tokens in multiples of {length_multiple}, "
            f"but row {row} has {int(lens[row])} ({tokens[row]} padded); "
            "raise batch.max_tokens or lower rollout.max_new_tokens"
        )
    plans = []
    for rows in _mini_batch_rows(np.asarray(group, dtype=np.int64), mini_batches):
        attention = attention_cost * tokens[rows].astype(np.float64) ** 2
        bin_of, num_bins = _pack(tokens[rows], attention, dp, micro_batch_multiple, capacity)
        fullest = int(np.bincount(bin_of, tokens[rows]).max())
        plans.append(
            MiniBatch(
                rows=tuple(rows.tolist()),
                padded_length=int(_round_up(fullest, length_multiple)),
                micro_batches=_deal(rows, bin_of, tokens[rows] + attention, num_bins, dp),
            )
        )
    return Plan(mini_batches=tuple(plans))


def _round_up(values, multiple: int):
    return -(-values // multiple) * multiple


def _mini_batch_rows(group: Ints, mini_batches: int) -> list[Ints]:
    """Row numbers of each mini-batch, ascending."""
    _, first, member = np.unique(group, return_index=True, return_inverse=True)
    if not len(first) or len(first) % mini_batches:
        raise ValueError(
            f"batch.mini_batches is {mini_batches}, which does not divide the {len(first)} prompts of the batch; "
            "choose a divisor, so that every optimizer step sees as many prompts"
        )
    place = np.empty_like(first)
    place[first.argsort()] = np.arange(len(first))
    mini_batch_of = place[member] * mini_batches // len(first)
    return [np.flatnonzero(mini_batch_of == k) for k in range(mini_batches)]


def _pack(tokens: Ints, attention: Floats, dp: int, multiple: int, capacity: int) -> tuple[Ints, int]:
    """Bin number of each sequence, and the number of bins: as few as fit, balanced in tokens and then in attention."""
    step = dp * multiple
    num_bins = step * max(1, -(-int(tokens.sum()) // (step * capacity)))
    while True:
        share = _attention_share(attention, num_bins, dp)
        bin_of = _place(tokens, attention, share, capacity, balance=True)
        if bin_of is None:  # balancing wastes room: the tightest packing may still fit
            bin_of = _place(tokens, attention, share, capacity, balance=False)
        if bin_of is not None:
            return _level(bin_of, tokens, attention, share), num_bins
        num_bins += step


def _attention_share(attention: Floats, num_bins: int, dp: int) -> Floats:
    """Attention that each bin should get, [num_bins] in runs of dp bins that will run together.

    Equal shares, but for bins that run together with a sequence that alone costs more: they should cost as much.
    """
    longest_first, left = np.sort(attention)[::-1], attention.sum() / dp
    shares = []
    for k in range(num_bins // dp):
        longest = longest_first[k * dp] if k * dp < len(longest_first) else 0.0
        shares.append(max(left / (num_bins // dp - k), min(left, longest)))
        left -= shares[-1]
    return np.repeat(shares, dp)


def _place(tokens: Ints, attention: Floats, share: Floats, capacity: int, *, balance: bool) -> Ints | None:
    """Put each sequence, longest first, into one of the bins with room for it; None if there is none.

    Balanced: where it adds least to the sum of squares of the bins' tokens and of their attention over `share`. The
    product with its own cost makes a long sequence go by attention and a short one by tokens. Otherwise: best fit.
    """
    bin_tokens, bin_attention = np.zeros(len(share)), -share
    bin_of = np.empty(len(tokens), dtype=np.int64)
    for i in np.argsort(-tokens, kind="stable"):
        added = tokens[i] * bin_tokens + _PLACE_WEIGHT * attention[i] * bin_attention if balance else -bin_tokens
        chosen = int(np.where(bin_tokens + tokens[i] <= capacity, added, np.inf).argmin())
        if bin_tokens[chosen] + tokens[i] > capacity:
            return None
        bin_of[i] = chosen
        bin_tokens[chosen] += tokens[i]
        bin_attention[chosen] += attention[i]
    return bin_of


def _level(bin_of: Ints, tokens: Ints, attention: Floats, share: Floats) -> Ints:
    """Swap sequences out of the fullest bins, since the fullest sets the padded length of all.

    Each swap takes tokens from the fullest bin to another that stays below it, the one that lowers the weighted sum of
    squares of tokens and of attention over `share` most. Done when no bin exceeds the mean or the longest sequence.
    """
    num_bins = len(share)
    target = max(tokens.max(), (1 + _LEVEL_TOLERANCE) * tokens.sum() / num_bins)
    # An empty sequence in every bin makes a move a swap like any other.
    bin_of = np.concatenate([bin_of, np.arange(num_bins)])
    tokens = np.concatenate([tokens, np.zeros(num_bins, dtype=np.int64)])
    attention = np.concatenate([attention, np.zeros(num_bins)])
    bin_tokens, bin_attention = np.bincount(bin_of, tokens), np.bincount(bin_of, attention) - share
    stuck = np.zeros(num_bins, dtype=bool)
    for _ in range(_MAX_SWAPS):
        fullest = int(np.where(stuck, 0, bin_tokens).argmax())
        if stuck[fullest] or bin_tokens[fullest] <= target:
            break
        leaving = np.flatnonzero(bin_of == fullest)
        leaving = leaving[:: 1 + len(leaving) // _MAX_LEAVING]
        d_tokens = tokens[leaving, None] - tokens
        d_attention = attention[leaving, None] - attention
        room = bin_tokens[fullest] - bin_tokens[bin_of]
        change = d_tokens * (d_tokens - room) + _LEVEL_WEIGHT * d_attention * (
            d_attention - bin_attention[fullest] + bin_attention[bin_of]
        )
        change = np.where((d_tokens > 0) & (d_tokens < room), change, 0.0)
        out, back = np.unravel_index(change.argmin(), change.shape)
        if change[out, back] >= 0:
            stuck[fullest] = True
            continue
        other = bin_of[back]
        bin_of[leaving[out]], bin_of[back] = other, fullest
        bin_of[-num_bins:] = np.arange(num_bins)
        bin_tokens[[fullest, other]] += np.array([-1, 1]) * d_tokens[out, back]
        bin_attention[[fullest, other]] += np.array([-1, 1]) * d_attention[out, back]
        stuck[other] = False
    return bin_of[:-num_bins]


def _deal(rows: Ints, bin_of: Ints, cost: Floats, num_bins: int, dp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Bins to ranks: bins of similar cost run together, costliest first (memory that runs out does so at once).

    Of the dp bins that run together, the costliest goes to the rank with the least so far.
    """
    bins = [tuple(rows[bin_of == b].tolist()) for b in range(num_bins)]
    bin_cost = np.bincount(bin_of, cost, minlength=num_bins)
    by_cost = np.argsort(-bin_cost, kind="stable").reshape(-1, dp)
    load = np.zeros(dp)
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    for together in by_cost:
        for b, rank in zip(together, np.argsort(load, kind="stable"), strict=True):
            dealt[rank].append(bins[b])
            load[rank] += bin_cost[b]
    return tuple(tuple(micro_batches) for micro_batches in dealt)
