"""What a response is worth: verifiable rewards of ours, and a user's own by `module:function`."""

from megatron_gspo.reward.overlong import overlong_penalty
from megatron_gspo.reward.registry import register_reward
from megatron_gspo.reward.reward import Reward
from megatron_gspo.reward.watch import watched

__all__ = ["Reward", "overlong_penalty", "register_reward", "watched"]
