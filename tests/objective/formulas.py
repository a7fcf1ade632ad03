"""The published objectives in plain Python, a sequence at a time, from the papers' equations; numbers are FAMILY's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Response:
    """Of every trained token of one response: log-probabilities and advantage."""

    new: list[float]
    old: list[float]
    rollout: list[float]
    advantages: list[float]

    @property
    def log_r(self) -> list[float]:
        return [new - old for new, old in zip(self.new, self.old, strict=True)]


# (response, the point at which stop-gradients are taken) -> J_t of every token
Formula = Callable[[Response, Response], list[float]]


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1 - low), 1 + high)


def _pessimistic(ratios: Sequence[float], y: Response, low: float, high: float) -> list[float]:
    return [min(r * a, _clip(r, low, high) * a) for r, a in zip(ratios, y.advantages, strict=True)]


def _geometric_mean(log_r: Sequence[float]) -> float:
    return math.exp(math.fsum(log_r) / len(log_r))


def _gspo(y: Response, at: Response) -> list[float]:
    return _pessimistic([_geometric_mean(y.log_r)] * len(y.new), y, 0.02, 0.03)


def _gspo_token(y: Response, at: Response) -> list[float]:
    s = _geometric_mean(at.log_r)
    return _pessimistic([s * math.exp(new - sg) for new, sg in zip(y.new, at.new, strict=True)], y, 0.02, 0.03)


def _clipped(low: float, high: float) -> Formula:
    return lambda y, at: _pessimistic([math.exp(x) for x in y.log_r], y, low, high)


def _sapo(y: Response, at: Response) -> list[float]:
    def gate(r: float, tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (r - 1)))

    return [gate(math.exp(x), 1.0 if a > 0 else 1.05) * a for x, a in zip(y.log_r, y.advantages, strict=True)]


def _gmpo(y: Response, at: Response) -> list[float]:
    a = y.advantages[0]
    bounded = [min(x, 0.15) if a > 0 else max(x, -0.1) for x in y.log_r]
    return [_geometric_mean(bounded) * a] * len(bounded)


def _reinforce(weight: Callable[[Response], Sequence[float]]) -> Formula:
    """sg[w_t] A_t log pi(y_t)."""
    return lambda y, at: [w * a * new for w, a, new in zip(weight(at), y.advantages, y.new, strict=True)]


def _cispo(at: Response) -> list[float]:
    return [min(math.exp(x), 1.1) for x in at.log_r]


def _vespo(at: Response) -> list[float]:
    w = math.exp(math.fsum(at.log_r))
    return [w**2 * math.exp(3 * (1 - w)) if a >= 0 else w**3 * math.exp(2 * (1 - w)) for a in at.advantages]


def _dppo(divergence: Callable[[float, float], float], delta: float) -> Callable[[Response], list[float]]:
    def weight(new: float, old: float, a: float) -> float:
        pi, mu = math.exp(new), math.exp(old)
        leaves = (a > 0 and pi > mu) or (a < 0 and pi < mu)
        return 0.0 if leaves and divergence(pi, mu) > delta else min(pi / mu, 1.1)

    return lambda at: [weight(*x) for x in zip(at.new, at.old, at.advantages, strict=True)]


def _binary_kl(pi: float, mu: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def _minirl(at: Response) -> list[float]:
    def weight(new: float, old: float, rollout: float, a: float) -> float:
        r = math.exp(new - old)
        return 0.0 if (a > 0 and r > 1.15) or (a < 0 and r < 0.9) else min(math.exp(new - rollout), 1.2)

    return [weight(*x) for x in zip(at.new, at.old, at.rollout, at.advantages, strict=True)]


FORMULAS: dict[str, Formula] = {
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "grpo": _clipped(0.1, 0.1),
    "dapo": _clipped(0.1, 0.15),
    "dr_grpo": _clipped(0.12, 0.1),
    "sapo": _sapo,
    "cispo": _reinforce(_cispo),
    "gmpo": _gmpo,
    "vespo": _reinforce(_vespo),
    "dppo_tv": _reinforce(_dppo(lambda pi, mu: abs(pi - mu), 0.05)),
    "dppo_kl": _reinforce(_dppo(_binary_kl, 0.005)),
    "minirl": _reinforce(_minirl),
}


def loss_of(name: str, aggregation: str, ys: Sequence[Response], ats: Sequence[Response], max_tokens: int) -> float:
    """- sum_i w_i sum_t J_it of a whole mini-batch."""
    n, t = len(ys), sum(len(y.new) for y in ys)
    weights = {
        "sequence_mean": lambda y: 1 / (n * max(len(y.new), 1)),
        "token_mean": lambda y: 1 / t,
        "sequence_sum": lambda y: 1 / n,
        "constant": lambda y: 1 / (n * max_tokens),
    }[aggregation]
    return -math.fsum(weights(y) * j for y, at in zip(ys, ats, strict=True) if y.new for j in FORMULAS[name](y, at))
