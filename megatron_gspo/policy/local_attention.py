"""Causal core attention in plain torch for packed rows (THD) at any context-parallel size, with sliding windows and
attention sinks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_gspo.policy.packed import Buckets, attention_buckets


class LocalAttention(MegatronModule):
    """Twin of TEDotProductAttention for causal self-attention in THD format.

    With context parallelism K and V are gathered over the CP group, and every rank attends with its zigzag chunks.
    `softmax_offset` [heads] are the logits of the attention sinks, where softmax_type is learnable.
    Latent attention hands in values as wide as keys, and cuts the output: Megatron pads the values of packed rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        assert attention_type == "self" and config.attention_dropout == 0.0, "only causal self-attention is built"
        assert pg_collection is not None, "process groups must be handed in"
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window, ahead = config.window_size
            assert ahead == 0, "a window of causal attention ends at the query"
        self.softmax_offset: torch.nn.Parameter | None = None
        assert config.softmax_type in ("vanilla", "learnable"), f"softmax_type {config.softmax_type} is not built"
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

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
        buckets = attention_buckets(bounds, self.cp_group.size(), self.cp_group.rank(), self.window)
        return attend(query, key, value, buckets, self.scale, self.softmax_offset).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sinks, cut over TP."""
        assert metadata is not None, "dist_checkpointing passes metadata with dp_cp_group"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def attend(
    query: Tensor, key: Tensor, value: Tensor, buckets: Buckets, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """query [t, heads, d], gathered key and value [t x cp, groups, d], sinks [heads] -> [t, heads, d].

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
        if sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            out = _attend_with_sinks(q, k, v, mask, scale, sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, buckets.unpad)


def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """[documents, heads, queries, d]. A sink takes part in the softmax of its head, and nothing is attended there."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    logits = torch.cat([scores.masked_fill(~mask, -torch.inf), sink], -1)
    return logits.softmax(-1)[..., :-1] @ v


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
