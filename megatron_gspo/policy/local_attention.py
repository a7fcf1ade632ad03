"""Causal core attention in plain torch for packed rows (THD) at any context-parallel size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.policy.packed import Buckets, attention_buckets


class LocalAttention(MegatronModule):
    """Twin of TEDotProductAttention for causal self-attention in THD format.

    With context parallelism K and V are gathered over the CP group, and every rank attends with its zigzag chunks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        assert attention_type == "self" and config.attention_dropout == 0.0, "only causal self-attention is built"
        assert pg_collection is not None, "process groups must be handed in"
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, groups, d] -> [t, heads x d]; t = cu_seqlens[-1] / cp.

        Raises ValueError without `packed_seq_params`: the CPU path feeds packed rows only.
        """
        if packed_seq_params is None:
            raise ValueError("the CPU attention takes packed rows only: pass packed_seq_params (qkv_format 'thd')")
        bounds = tuple(packed_seq_params.cu_seqlens_q_padded.tolist())
        if bounds[-1] != len(query) * self.cp_group.size():
            raise ValueError(
                f"cu_seqlens ends at {bounds[-1]}, but {self.cp_group.size()} CP ranks hold {len(query)} tokens each; "
                f"a padding tail must be a document of its own"
            )
        if self.cp_group.size() > 1:
            key, value = _GatherSequence.apply(torch.stack([key, value], 1), self.cp_group).unbind(1)
        buckets = attention_buckets(bounds, self.cp_group.size(), self.cp_group.rank())
        return attend(query, key, value, buckets, self.scale).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Nothing to save."""
        return {}


def attend(query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, scale: float) -> Tensor:
    """query [t, heads, d], gathered key and value [t x cp, groups, d] -> [t, heads, d].

    One gather in and one out whatever the number of rectangles: their backward passes touch each token once.
    """
    query_cells = [documents * queries for documents, queries, _ in buckets.shapes]
    key_cells = [documents * keys for documents, _, keys in buckets.shapes]
    pieces = zip(
        buckets.shapes,
        query.index_select(0, buckets.queries).split(query_cells),
        key.index_select(0, buckets.keys).split(key_cells),
        value.index_select(0, buckets.keys).split(key_cells),
        buckets.masks,
        strict=True,
    )
    outputs = []
    for (documents, _, _), q, k, v, mask in pieces:
        q, k, v = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, buckets.unpad)


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0 over `group`; the backward pass reduce-scatters. Called by all its ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size() * len(local), *local.shape[1:]))
        dist.all_gather_single(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gathered,) = grads
        local = gathered.new_empty((len(gathered) // ctx.group.size(), *gathered.shape[1:]))
        dist.reduce_scatter_single(local, gathered.contiguous(), group=ctx.group)
        return local, None
