"""From trajectories to what one rank feeds to the model. The one owner of zigzag positions and of the label shift.

A micro-batch is one packed row (THD): documents padded to a multiple of 2 x cp, then a padding tail that is a document
of its own. Labels shift inside each document before the zigzag split, so no rank needs its neighbour's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.batch.trajectory import Trajectories


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One rank's part of a micro-batch of m trajectories; t = padded_length / cp.

    tokens, position_ids [1, t] int64; padding_mask [1, t] bool, True on padding (token 0).
    labels [t] int64: the next token of the same document, 0 where there is none.
    loss_mask [t] bool: the label trains. rollout_logprobs [t] float32: the rollout engine's, of the label.
    cu_seqlens [d+1] int32: boundaries of the padded documents over all CP ranks, tail included: 0 to padded_length.
    max_seqlen: tokens of the longest padded document.
    rows [m] int64: batch row numbers, in document order. offsets [m+1] int64: trajectory i owns the LOCAL tokens
    [offsets[i], offsets[i+1]), padding inside its document included; the tail follows after offsets[m].
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    padding_mask: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    offsets: Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **moved)


def document_multiple(cp: int) -> int:
    """Tokens that a document's padded length is a multiple of: 2 x cp, so that each CP rank gets two equal chunks."""
    return 2 * cp if cp > 1 else 1


def zigzag_positions(length: int, cp: int, cp_rank: int) -> Tensor:
    """[length / cp] int64: positions of a document that `cp_rank` owns, namely chunks r and 2 cp - 1 - r of 2 cp.

    The pairing gives every rank the same causal-attention work. `length` must be a multiple of `document_multiple(cp)`.
    """
    if length % document_multiple(cp):
        raise ValueError(f"a document of {length} tokens does not divide into 2 x cp = {2 * cp} chunks; pad it first")
    if cp == 1:
        return torch.arange(length)
    chunks = torch.arange(length).view(2 * cp, length // (2 * cp))
    return chunks[[cp_rank, 2 * cp - 1 - cp_rank]].flatten()


def shard(trajectories: Trajectories, rows: Sequence[int], *, padded_length: int, cp: int, cp_rank: int) -> MicroBatch:
    """Pack `rows` in the given order and keep what `cp_rank` owns. No rows gives a micro-batch of padding alone.

    Raises ValueError if the padded documents need more than `padded_length` tokens.
    """
    multiple = document_multiple(cp)
    if padded_length % multiple:
        raise ValueError(f"padded_length {padded_length} must be a multiple of {multiple} at cp {cp}")
    packed = trajectories.select(rows)
    lens = packed.offsets.diff()
    padded_lens = (lens + multiple - 1) // multiple * multiple
    tail = padded_length - int(padded_lens.sum())
    if tail < 0:
        raise ValueError(
            f"rows {list(rows)} need {padded_length - tail} tokens with each padded to a multiple of {multiple}, "
            f"more than padded_length {padded_length}"
        )
    documents = padded_lens.tolist() + [tail] * (tail > 0)
    starts = torch.tensor([0, *documents]).cumsum(0)

    # Where each token of `packed` stands in the padded row, and the same for its label (one place earlier).
    shift = torch.repeat_interleave(starts[: lens.numel()] - packed.offsets[:-1], lens)
    place = torch.arange(packed.tokens.numel()) + shift
    has_label = torch.ones_like(packed.loss_mask)
    has_label[packed.offsets[:-1]] = False

    def spread(places: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(padded_length, dtype=values.dtype).index_copy_(0, places, values)

    def spread_labels(values: Tensor) -> Tensor:
        return spread(place[has_label] - 1, values[has_label])

    mine = torch.cat(
        [start + zigzag_positions(length, cp, cp_rank) for start, length in zip(starts[:-1], documents, strict=True)]
    )
    position_ids = torch.cat([torch.arange(length) for length in documents])
    return MicroBatch(
        tokens=spread(place, packed.tokens)[mine][None],
        position_ids=position_ids[mine][None],
        labels=spread_labels(packed.tokens)[mine],
        loss_mask=spread_labels(packed.loss_mask)[mine],
        rollout_logprobs=spread_labels(packed.logprobs)[mine],
        padding_mask=~spread(place, torch.ones_like(packed.loss_mask))[mine][None],
        cu_seqlens=starts.int(),
        max_seqlen=max(documents),
        rows=packed.rows,
        offsets=torch.cat([starts[:1], padded_lens.cumsum(0)]) // cp,
    )
