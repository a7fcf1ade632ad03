"""The clipped token-level objective that PPO, GRPO, DAPO and Dr.GRPO share."""

from __future__ import annotations

from megatron_gspo.objective.surrogate import Surrogate, clipped_surrogate
from megatron_gspo.objective.tokens import Ratios


def clipped_tokens(x: Ratios, *, clip_low: float, clip_high: float) -> Surrogate:
    """min( r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t ),   r_t = pi(y_t) / pi_old(y_t).

    PPO (arXiv 1707.06347, eq. 7): A_t from a critic, averaged over all tokens.
    GRPO (arXiv 2402.03300, eq. 3): A_t = A_i, averaged over the tokens of a sequence, then over sequences.
    DAPO (arXiv 2503.14476, eq. 8): clip_high above clip_low, averaged over all tokens.
    Dr.GRPO (arXiv 2503.20783, section 3.2): A_i without std, summed over tokens and divided by a constant.
    """
    return clipped_surrogate(
        x.log_ratio.exp(), x.advantages, clip_low=clip_low, clip_high=clip_high, log_ratio=x.log_ratio
    )
