"""Group Sequence Policy Optimization (GSPO) and GSPO-token, arXiv 2507.18071."""

from __future__ import annotations

from megatron_gspo.objective.surrogate import Surrogate, clipped_surrogate
from megatron_gspo.objective.tokens import Ratios


def gspo_token(x: Ratios, *, clip_low: float, clip_high: float) -> Surrogate:
    """min( s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it ), to be averaged over tokens, then over sequences.

        s_i  = exp( (1/|y_i|) sum_t log(pi(y_t) / pi_old(y_t)) )                              (eq. 7)
        s_it = sg[s_i] pi(y_t) / sg[pi(y_t)]                                                   (eq. 14)
        J    = (1/N) sum_i (1/|y_i|) sum_t min( s_it A_it, clip(s_it) A_it )                     (eq. 13)

    With A_it = A_i for all t this is GSPO itself, in value and in gradient:

        J    = (1/N) sum_i min( s_i A_i, clip(s_i) A_i )                                        (eq. 5)

    Terms are [m] then, one for all tokens of a sequence. A rank sums over its own tokens, so the shares of the CP ranks
    add up to the loss, gradients likewise, and no collective stands in the backward pass.
    """
    a = x.given_advantages
    log_s = x.log_s if x.is_of_sequences(a) else x.spread(x.log_s)
    return clipped_surrogate(log_s.exp(), a, clip_low=clip_low, clip_high=clip_high, log_ratio=log_s)
