"""Paged attention of SGLang's torch_native backend, batched over sequences instead of one Python iteration each.

B sequences of a chunk, E new tokens each (padded), L cached tokens each (padded, new ones included), H query heads,
G key-value heads, D head size, T new tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Bounds the padded copy of keys and values, and the scores, of one call: B x E x L. Small enough to stay in the cache.
CHUNK_ELEMENTS = 1 << 14


def decode(
    original: Callable,
    backend: object,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Hook around `_run_sdpa_forward_decode`: one new token per sequence. query, output [n, H, D]; seq_lens [n]."""
    caches = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if not _plain(encoder_lens, options):
        return original(backend, query, output, *caches, encoder_lens, **options)
    return paged_attention(query, output, *caches, torch.ones_like(seq_lens), options["scaling"])


def extend(
    original: Callable,
    backend: object,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Hook around `_run_sdpa_forward_extend`: several new tokens per sequence. query, output [T, H, D]; lens [n]."""
    caches = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if not _plain(encoder_lens, options) or not options["causal"]:
        return original(backend, query, output, *caches, extend_prefix_lens, extend_seq_lens, encoder_lens, **options)
    return paged_attention(query, output, *caches, extend_seq_lens, options["scaling"])


def _plain(encoder_lens: Tensor | None, options: dict[str, Any]) -> bool:
    return encoder_lens is None and options.get("sliding_window_size") is None and not options.get("is_cross_attn")


def paged_attention(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    new_lens: Tensor,
    scale: float | None,
) -> Tensor:
    """Causal attention of the last `new_lens[i]` tokens of sequence i over all its `seq_lens[i]` cached tokens.

    query [T, H, D] and output [T, H, D] (written in place and returned) hold the new tokens, sequence after sequence;
    k_cache, v_cache [slots, G, D]; req_to_token [requests, context] maps a request's positions to slots;
    req_pool_indices, seq_lens, new_lens [n] int.
    """
    starts = new_lens.cumsum(0) - new_lens
    for chunk in _chunks(seq_lens, new_lens):
        lens, news = seq_lens[chunk, None], new_lens[chunk, None]
        position = torch.arange(int(lens.max()))
        step = torch.arange(int(news.max()))
        slots = req_to_token[req_pool_indices[chunk], : len(position)].long()
        # Padding repeats the first slot: a NaN in a stale one would survive the mask (0 x NaN).
        slots = torch.where(position < lens, slots, slots[:, :1])
        rows = starts[chunk, None] + torch.minimum(step, news - 1)
        visible = position <= (lens - news + step)[:, :, None]
        out = scaled_dot_product_attention(
            _take(query, rows),
            _take(k_cache, slots).to(query.dtype),
            _take(v_cache, slots).to(query.dtype),
            attn_mask=visible[:, None],
            enable_gqa=query.shape[1] != k_cache.shape[1],
            scale=scale,
        )
        real = step < news
        output.index_copy_(0, rows[real], out.transpose(1, 2)[real])
    return output


def _take(source: Tensor, index: Tensor) -> Tensor:
    """source [rows, heads, D], index [B, L] -> [B, heads, L, D]. `index_select` copies five times as fast as `[]`."""
    taken = source.index_select(0, index.reshape(-1))
    return taken.view(*index.shape, *source.shape[1:]).transpose(1, 2)


def _chunks(seq_lens: Tensor, new_lens: Tensor) -> Iterator[Tensor]:
    """Yield indices [B] of sequences of similar length, so that little is padded, within CHUNK_ELEMENTS."""
    order = torch.argsort(new_lens * (int(seq_lens.max()) + 1) + seq_lens)
    first, widest, longest = 0, 0, 0
    for i, (new, total) in enumerate(zip(new_lens[order].tolist(), seq_lens[order].tolist(), strict=True)):
        widest, longest = max(widest, new), max(longest, total)
        if i > first and (i + 1 - first) * widest * longest > CHUNK_ELEMENTS:
            yield order[first:i]
            first, widest, longest = i, new, total
    yield order[first:]
