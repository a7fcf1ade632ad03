"""Load-balancing losses of the router with the same gradient on every layout.

Megatron-Core 0.19.2 (`moe_utils.get_tokens_per_expert_and_token_count`) counts a rank's own tokens after an all-reduce
has overwritten the counts in place: with a padding mask, every rank takes the tokens of all TP x CP ranks for its own,
and the loss comes out larger by their number. On GPUs too.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe import router
from torch import Tensor


def install() -> None:
    """Give Megatron's routers the count below; harmless when done twice."""
    router.get_tokens_per_expert_and_token_count = count_tokens


def count_tokens(
    routing_map: Tensor, reduce_group: dist.ProcessGroup, topk: int, with_padding_mask: bool = False
) -> tuple[Tensor, Tensor | float, Tensor | int]:
    """(tokens per expert [E] over all ranks of the group, mean tokens of a rank, tokens of all ranks).

    routing_map [n, E] bool, without padding where `with_padding_mask`. Megatron scales a rank's share of the loss by
    the second times the number of ranks: the mean, as padding lies on some ranks only and shares must weigh the same.
    """
    per_expert = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), reduce_group)
    total = per_expert.sum() / topk if with_padding_mask else routing_map.shape[0] * reduce_group.size()
    return per_expert, total / reduce_group.size(), total
