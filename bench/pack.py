"""Padding and FLOP imbalance of the packing plan, against first-fit and round-robin, in one run.

    python bench/pack.py

Lengths are lognormal (median, sigma), cut at 64 and 32,768 tokens. Attention costs 6e-5 L^2 in units of one token's
other FLOPs (Qwen3-30B-A3B). Columns: micro-batches per DP rank; padding: share of all positions that hold no token;
ranks: FLOPs of the busiest DP rank over the mean; lockstep: the same, where ranks wait for each other in every
micro-batch, as experts spread over DP make them. Padding FLOPs are counted as padding, not as imbalance.
`least` is the padding that any plan with as many micro-batches has, as one padded length holds the longest sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from megatron_gspo.batch.pack import MiniBatch, plan_batch

ATTENTION_COST = 6e-5
LENGTH_MULTIPLE = 64
LONGEST = 32768
Bins = list[list[list[int]]]  # [dp_rank][k] -> rows


def first_fit(lens: np.ndarray, dp: int, max_tokens: int) -> Bins:
    """Each sequence, as it comes, into the first micro-batch with room; micro-batches dealt to ranks in turn."""
    bins: list[list[int]] = []
    used: list[int] = []
    for row, length in enumerate(lens.tolist()):
        chosen = next((b for b, tokens in enumerate(used) if tokens + length <= max_tokens), len(bins))
        if chosen == len(bins):
            bins.append([])
            used.append(0)
        bins[chosen].append(row)
        used[chosen] += length
    return [bins[rank::dp] for rank in range(dp)]


def round_robin(lens: np.ndarray, dp: int, max_tokens: int) -> Bins:
    """Sequences dealt to ranks in turn; each rank closes a micro-batch when the next sequence does not fit."""
    ranks: Bins = []
    for rank in range(dp):
        bins: list[list[int]] = [[]]
        for row in range(rank, len(lens), dp):
            if lens[bins[-1]].sum() + lens[row] > max_tokens:
                bins.append([])
            bins[-1].append(row)
        ranks.append(bins)
    return ranks


def planned(lens: np.ndarray, dp: int, max_tokens: int) -> Bins:
    """The product's plan."""
    plan: MiniBatch = plan_batch(
        lens.tolist(),
        [0] * len(lens),
        mini_batches=1,
        dp=dp,
        max_tokens=max_tokens,
        cp=1,
        length_multiple=LENGTH_MULTIPLE,
        attention_cost=ATTENTION_COST,
    ).mini_batches[0]
    return [[list(rows) for rows in micro_batches] for micro_batches in plan.micro_batches]


def measure(lens: np.ndarray, bins: Bins) -> tuple[int, float, float, float, float]:
    """(micro-batches per rank, padding, least padding, imbalance over ranks, imbalance in lockstep)."""
    count = max(len(rank) for rank in bins)
    full = [rank + [[]] * (count - len(rank)) for rank in bins]
    tokens = np.array([[lens[rows].sum() for rows in rank] for rank in full], dtype=float)
    squares = np.array([[(lens[rows].astype(float) ** 2).sum() for rows in rank] for rank in full])
    cost = tokens + ATTENTION_COST * squares
    padded_length = -(-tokens.max() // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    share = cost.sum() / len(bins)
    return (
        count,
        1 - tokens.mean() / padded_length,
        1 - tokens.mean() / max(tokens.mean(), lens.max()),
        cost.sum(axis=1).max() / share - 1,
        cost.max(axis=0).sum() / share - 1,
    )


def main() -> None:
    methods: dict[str, Callable[[np.ndarray, int, int], Bins]] = {
        "plan": planned,
        "first-fit": first_fit,
        "round-robin": round_robin,
    }
    case = f"{'lengths':14} {'n':>5} {'dp':>3} {'max_tokens':>10}"
    print(case, f"{'method':11} {'m':>3} {'padding':>8} {'least':>8} {'ranks':>8} {'lockstep':>8} {'CPU s':>6}")
    for median, sigma in ((1000, 1.5), (2000, 1.0), (4000, 0.8), (8000, 0.5)):
        for n, dp in ((512, 8), (4096, 8), (4096, 32)):
            random = np.random.default_rng(0)
            lens = np.clip(random.lognormal(np.log(median), sigma, n), 64, LONGEST).astype(np.int64)
            for max_tokens in (LONGEST, 2 * LONGEST, 4 * LONGEST):
                case = f"{f'{median}, {sigma}':14} {n:5} {dp:3} {max_tokens:10}"
                for name, method in methods.items():
                    start = time.process_time()
                    bins = method(lens, dp, max_tokens)
                    seconds = time.process_time() - start
                    count, *shares = measure(lens, bins)
                    print(case, f"{name:11} {count:3}", *(f"{share:8.2%}" for share in shares), f"{seconds:6.2f}")


if __name__ == "__main__":
    main()
