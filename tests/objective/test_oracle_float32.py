"""The family against the oracle in float32: off by the rounding of its inputs, and of the gradient that comes out.

Everything in between is float64, so float32 log-probabilities cost exactly this:

A log-probability x is rounded by at most |x| 2^-24. So log r_t, and with it the mean log s_i, is off by at most
delta = max_t (|new_t| + |old_t|) 2^-24. With |A| and the weights as given, a token's term is off by at most |A| times
what `MOVES` says; its slope relatively by what `slope_moves` says and by the 2^-24 of its own rounding.
A ratio within delta of a bound may fall on its other side: its slope is not determined. Its value is, as surrogates
are continuous.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_gspo.objective import Totals, token_weights
from tests.objective.family import ORACLE, oracle_member
from tests.objective.oracle import Case, cases, numbers
from tests.objective.packed import evaluate, packed_loss, tokens_of

EPS = 2.0**-24
LARGEST = torch.finfo(torch.float32).max
every_pair = pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(c, name, id=f"{c.id}-{name}") for c in cases().values() for name in ORACLE if name in c.expected],
)

# What a term of |A| = 1 moves by, of a row's r [T], s [], log pi [T] and delta, where exp(x) moves by exp(x) delta.
# SAPO: |d f / d log r| = r / cosh( tau (r - 1) / 2 )^2 is below r, and below 1.6 at tau >= 1.
# CISPO: min(r, 5) moves as r does until 5, and log pi by its own rounding.
# GMPO: c_t moves by less than log r_t, g = exp( mean c ) below the mean that only low ratios are clipped in.
MOVES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "gspo": lambda r, s, logp, delta: s * delta,
    "sapo": lambda r, s, logp, delta: r.clamp(max=1.6) * delta,
    "cispo": lambda r, s, logp, delta: r.clamp(max=5) * logp.abs() * (delta + EPS),
    "gmpo": lambda r, s, logp, delta: r.log().clamp(min=-0.4).mean().exp() * delta,
}
MOVES["gspo_token"] = MOVES["gspo"]
MOVES["grpo"] = MOVES["dapo"] = MOVES["dr_grpo"] = lambda r, s, logp, delta: r * delta


def slope_moves(name: str, r: Tensor, delta: float) -> Tensor:
    """d log(slope) / d log r is 1 for a ratio. For SAPO it is 1 + tau r (1 - 2p), between 1 - tau r and 1 + tau r."""
    return (1 + 1.05 * r) * delta if name == "sapo" else torch.full_like(r, delta)


def bounds(name: str, hp: dict[str, float]) -> tuple[float, ...]:
    """Of the log-ratio, where the slope is cut off."""
    match name:
        case "gspo" | "gspo_token":
            return math.log1p(-hp["gspo_eps_low"]), math.log1p(hp["gspo_eps_high"])
        case "grpo" | "dr_grpo":
            return math.log1p(-hp["eps_low"]), math.log1p(hp["eps_low"])
        case "dapo":
            return math.log1p(-hp["eps_low"]), math.log1p(hp["dapo_eps_high"])
        case "gmpo":
            return -hp["gmpo_eps"], hp["gmpo_eps"]
    return ()


def largest(case: Case) -> float:
    """|new| + |old| over trained tokens of good rows."""
    sums = [new.abs() + old.abs() for new, old in zip(case.new, case.old, strict=True)]
    kept = [x[mask] for x, mask in zip(sums, case.mask, strict=True)]
    return max(x.nan_to_num(0, 0, 0).amax().item() for x in kept if x.numel()) if any(map(len, kept)) else 0.0


@every_pair
def test_float32(case: Case, name: str):
    expected, result = case.expected[name], packed_loss(case, name, dtype=torch.float32)
    delta = largest(case) * EPS
    member = oracle_member(name, case.hp)
    advantages = (case.without_std if member.without_std else case.advantages).abs()
    totals = Totals(
        num_sequences=case.n, num_tokens=int(case.trained_lens.sum()), max_tokens=int(case.hp["dr_grpo_max_len"])
    )
    weights = token_weights(member.aggregation, case.trained_lens, totals)
    tolerance = 1e-15
    for i, (new, old, mask) in enumerate(zip(case.new, case.old, case.mask, strict=True)):
        if i in case.expected["must_detect_rows"] or not mask.any():
            assert not result.gradient[i].any()
            continue
        log_r = (new - old)[mask]
        log_s = log_r.mean()
        r, s = log_r.exp(), log_s.exp()
        scale = case.token_advantages[i][mask].abs() if name == "gspo_token" else advantages[i]
        moves = MOVES[name](r, s, new[mask].nan_to_num(0, 0, 0), delta).expand_as(r)
        tolerance += (weights[i] * scale * moves).sum().item()

        bounded = log_s.expand_as(log_r) if name.startswith("gspo") else log_r
        sure = torch.ones_like(log_r, dtype=torch.bool)
        for bound in bounds(name, case.hp):
            sure &= (bounded - bound).abs() > delta
        if "grad" not in expected:
            continue
        got, want = result.gradient[i][mask][sure], numbers(expected["grad"][i])[: len(mask)][mask][sure]
        off = (got - want.clamp(-LARGEST, LARGEST)).abs()
        allowed = want.abs() * (slope_moves(name, r, delta)[sure] * (1 + delta) + EPS) + 2.0**-149
        assert (off <= allowed).all(), f"row {i}: off by {off.tolist()}, allowed {allowed.tolist()}"
    assert result.loss == pytest.approx(
        expected["loss"], rel=0, abs=tolerance * (1 + 2 * delta) + 1e-12 * abs(expected["loss"])
    )


@every_pair
def test_float32_loses_nothing_else(case: Case, name: str):
    """Of inputs that float32 holds, loss and metrics are those of float64 bit for bit, the gradient its rounding."""
    member, advantages = oracle_member(name, case.hp), case.advantages
    new, old = ([row.float() for row in side] for side in (case.new, case.old))
    single, double = (
        evaluate(tokens_of(new, old, advantages=advantages, mask=case.mask, dtype=dtype), member)
        for dtype in (torch.float32, torch.float64)
    )
    assert single.loss == double.loss
    assert single.reported == pytest.approx(double.reported, rel=0, abs=0, nan_ok=True)
    assert torch.equal(single.flat, double.flat.clamp(-LARGEST, LARGEST).float().double())
