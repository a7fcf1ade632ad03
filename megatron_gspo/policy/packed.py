"""Where the tokens of a packed row (THD) stand: pure index arithmetic, memoised, for every layer asks it again."""

from __future__ import annotations

from collections import defaultdict
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
    sees the key; None at cp 1, where plain causal masking does it: padding comes after every real token.
    """

    shapes: tuple[tuple[int, int, int], ...]
    queries: Tensor
    keys: Tensor
    unpad: Tensor
    masks: tuple[Tensor | None, ...]


@lru_cache(maxsize=16)
def attention_buckets(bounds: tuple[int, ...], cp: int, cp_rank: int) -> Buckets:
    """Rectangles for causal attention inside each document, queries of `cp_rank` against the keys of all CP ranks.

    The key rows are those of an all-gather over CP: rank r's t tokens stand at [r t, (r + 1) t).
    """
    lens = [end - start for start, end in pairwise(bounds)]
    local_tokens = bounds[-1] // cp
    groups: dict[int, list[int]] = defaultdict(list)
    for document, length in enumerate(lens):
        if length:
            groups[-(-length // BUCKET_TOKENS)].append(document)
    shapes, queries, keys, masks = [], [], [], []
    unpad = torch.empty(local_tokens, dtype=torch.int64)
    cells = 0
    for _, documents in sorted(groups.items()):
        longest = max(lens[document] for document in documents)
        width = longest // cp
        rows, columns, visible = [], [], []
        for number, document in enumerate(documents):
            length, start = lens[document], bounds[document] // cp
            local = length // cp
            rows.append(_padded(torch.arange(start, start + local), width))
            columns.append(_padded(_gathered_rows(length, start, local_tokens, cp), longest))
            unpad[start : start + local] = torch.arange(local) + cells + number * width
            if cp > 1:
                mine = _padded(zigzag_positions(length, cp, cp_rank), width)
                visible.append(mine[:, None] >= torch.arange(longest))
        shapes.append((len(documents), width, longest))
        queries += rows
        keys += columns
        masks.append(torch.stack(visible)[:, None] if cp > 1 else None)
        cells += len(documents) * width
    return Buckets(tuple(shapes), torch.cat(queries), torch.cat(keys), unpad, tuple(masks))


def _gathered_rows(length: int, start: int, local_tokens: int, cp: int) -> Tensor:
    """[length] int64: gathered row of each position of the document that begins at local token `start` on each rank."""
    rows = torch.empty(length, dtype=torch.int64)
    for rank in range(cp):
        first = rank * local_tokens + start
        rows[zigzag_positions(length, cp, rank)] = torch.arange(first, first + length // cp)
    return rows


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values[-1:].expand(length - len(values))])
