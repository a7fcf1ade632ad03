"""Where the tokens of a packed row (THD) stand: pure index arithmetic, memoised, for every layer asks it again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from megatron_gspo.batch.shard import zigzag_positions

# Documents are padded to a multiple of this many tokens and those of one length share one attention call.
BUCKET_TOKENS = 16


@lru_cache(maxsize=16)
def packed_positions(bounds: tuple[int, ...], cp: int, cp_rank: int) -> Tensor:
    """[t] int64: position inside its document of each token that `cp_rank` holds. `bounds`: cu_seqlens over all CP."""
    lens = [end - start for start, end in pairwise(bounds)]
    return torch.cat([zigzag_positions(length, cp, cp_rank) for length in lens])


@dataclass(frozen=True, eq=False)
class Buckets:
    """Documents of similar length, padded to rectangles.

    shapes: (documents, queries, keys) of each rectangle. queries, keys: for the rectangles one after the other, the
    local query row and the gathered key row of each cell; padding repeats the document's last token. unpad [t]: the
    cell that holds each local token. masks: per rectangle, [documents, 1, queries, keys] bool, True where the query
    sees the key; None at cp 1 without a window, where plain causal masking does it: padding comes after every real
    token.
    """

    shapes: tuple[tuple[int, int, int], ...]
    queries: Tensor
    keys: Tensor
    unpad: Tensor
    masks: tuple[Tensor | None, ...]


@lru_cache(maxsize=16)
def attention_buckets(bounds: tuple[int, ...], cp: int, cp_rank: int, window: int | None = None) -> Buckets:
    """Rectangles for causal attention inside each document, queries of `cp_rank` against the keys of all CP ranks.

    window: a query sees itself and as many tokens before it; None: all of them.
    The key rows are those of an all-gather over CP: rank r's t tokens stand at [r t, (r + 1) t).
    """
    starts, lens = torch.tensor(bounds[:-1]), torch.tensor(bounds).diff()
    gathered = _gathered_rows(bounds, cp)
    positions = packed_positions(bounds, cp, cp_rank)
    unpad = torch.empty_like(positions)
    shapes, queries, keys, masks = [], [], [], []
    first_cell = 0
    size_class = (lens + BUCKET_TOKENS - 1) // BUCKET_TOKENS
    for size in size_class[lens > 0].unique():
        documents = size_class == size
        rows = _rectangle(starts[documents] // cp, lens[documents] // cp)
        columns = _rectangle(starts[documents], lens[documents])
        real = torch.arange(rows.shape[1]) < lens[documents, None] // cp
        unpad[rows[real]] = first_cell + real.flatten().nonzero().squeeze(1)
        shapes.append((*rows.shape, columns.shape[1]))
        queries.append(rows.flatten())
        keys.append(gathered[columns].flatten())
        masks.append(_mask(positions[rows], columns.shape[1], window) if cp > 1 or window is not None else None)
        first_cell += rows.numel()
    return Buckets(tuple(shapes), torch.cat(queries), torch.cat(keys), unpad, tuple(masks))


def _mask(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """[documents, 1, queries, keys] bool for queries at `positions` [documents, queries]."""
    distance = positions[:, None, :, None] - torch.arange(keys)
    return (distance >= 0) if window is None else (distance >= 0) & (distance <= window)


def _gathered_rows(bounds: tuple[int, ...], cp: int) -> Tensor:
    """[bounds[-1]] int64: row of each token of the packed row after an all-gather over CP."""
    lens = torch.tensor(bounds).diff()
    document_start = torch.repeat_interleave(torch.tensor(bounds[:-1]), lens // cp)
    tokens = torch.cat([document_start + packed_positions(bounds, cp, rank) for rank in range(cp)])
    return torch.empty_like(tokens).index_copy_(0, tokens, torch.arange(len(tokens)))


def _rectangle(starts: Tensor, lens: Tensor) -> Tensor:
    """[documents, max(lens)] int64: start, start + 1, ... of each document, its last token repeated as padding."""
    return starts[:, None] + torch.minimum(torch.arange(int(lens.max())), lens[:, None] - 1)
