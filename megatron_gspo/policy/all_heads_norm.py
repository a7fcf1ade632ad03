"""QK-norm over all heads of a token (OLMoE): one RMS norm of the whole row, of which a TP rank holds some heads.

Megatron's own q_layernorm and k_layernorm see one head at a time. This one goes in their place, on GPU and CPU alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm over `heads` x `hidden_size`, the width of a head, in fp32.

    Every rank holds the whole weight [heads x hidden_size], in the order of the heads, and uses the part of its own
    heads. Megatron sums the gradients of all parameters called q_layernorm and k_layernorm over the TP group: what is
    zero outside a rank's own heads becomes whole. A weight cut over TP would be summed with other heads'.
    """

    def __init__(
        self, *, heads: int, tp_group: dist.ProcessGroup, config: TransformerConfig, hidden_size: int, eps: float
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))
        self.heads, self.eps, self.tp_group = heads, eps, tp_group

    def forward(self, x: Tensor) -> Tensor:
        """x [..., heads of this rank, width] -> the same shape. Collective over TP, forward and backward.

        With more ranks than key heads, several hold the same head: all are counted, equally often.
        """
        own, width = x.shape[-2:]
        first = self.tp_group.rank() * self.heads // self.tp_group.size()
        weight = self.weight.unflatten(0, (self.heads, width))[first : first + own]
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Each rank's output depends on the sum, so the sum's gradient is itself summed over the ranks.
        total = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares, group=self.tp_group), group=self.tp_group
        )
        mean = total / (own * width * self.tp_group.size())
        return weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)


def norm_all_heads(layer_specs: Sequence[Any], config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
    """Put AllHeadsNorm in place of the QK-norms of `layer_specs`."""
    for layer in layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = partial(AllHeadsNorm, heads=config.num_attention_heads, tp_group=tp_group)
        attention.k_layernorm = partial(AllHeadsNorm, heads=config.num_query_groups, tp_group=tp_group)
