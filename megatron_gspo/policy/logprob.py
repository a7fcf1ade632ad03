"""Log-probability and entropy of labels under a vocabulary-parallel output layer, without holding all logits.

Megatron's own cross-entropies do not serve: one overwrites fp32 logits in place, the fused one rounds gradients to
bf16 whatever the parameters are, and neither knows temperature, entropy or padding rows of the vocabulary.

Logits exist in tiles of some tokens by some vocabulary rows, in fp32, and are computed again in the backward pass:
memory beyond the gradients is two tiles, whatever the number of tokens and the size of the vocabulary. Tiles are taken
row block by row block, so that every row of the weight's gradient is finished at once and read from cache.

Dimensions: t tokens, h hidden size, v vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LogprobContext:
    """What `logprob_output_processor` needs besides the model: handed to GPTModel as `output_processor_context`.

    labels [t] int64: the token that each position predicts. vocab_size: rows from there on stand for no token.
    tile_tokens, tile_rows: largest tile of logits; they bound memory and change results by rounding alone.
    """

    labels: Tensor
    temperature: float
    vocab_size: int
    tp_group: dist.ProcessGroup
    tile_tokens: int = 2048
    tile_rows: int = 2048


def logprob_output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: LogprobContext, **_: Any
) -> Tensor:
    """GPTModel's `output_processor`: [2, t] fp32, the labels' log-probabilities with their graph, and the entropies.

    Entropies are for reports: a gradient of zeros for them would cost three passes over all logits.

    hidden_states: [t, 1, h], or [t / tp, 1, h] under sequence parallelism. output_weight: the tied embedding, if tied.
    A collective over the tensor-parallel group, in the backward pass too.
    """
    if output_layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_states, group=context.tp_group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=context.tp_group)
    weight = output_layer.weight if output_weight is None else output_weight
    logp, entropy = linear_logprob(hidden.squeeze(1), weight, context)
    return torch.stack([logp, entropy.detach()])


def linear_logprob(hidden: Tensor, weight: Tensor, context: LogprobContext) -> tuple[Tensor, Tensor]:
    """(logp [t], entropy [t]) in fp32 of softmax(hidden @ weight.T / temperature) over all ranks' rows.

    hidden [t, h], the same on all ranks of the group; weight [v, h], of the same dtype. Products are accumulated and
    kept in fp32. The gradient of `hidden` is this rank's part: its sum over the group is the caller's (the backward
    pass of Megatron's gather or copy).
    """
    if hidden.shape[0] != context.labels.shape[0]:
        raise ValueError(f"{hidden.shape[0]} hidden states but {context.labels.shape[0]} labels")
    return _LinearLogprob.apply(hidden, weight, context)


class _LinearLogprob(torch.autograd.Function):
    """Keeps per token the log-normaliser and the entropy; the backward pass computes the logits again.

    Both outputs are differentiable: with p = softmax(x), d logp / dx = onehot - p and d H / dx = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, context: LogprobContext) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        statistics = _Statistics.empty(hidden)
        for tile in _tiles(hidden, weight, context):
            statistics.add(tile, tile.logits())
        log_normaliser, entropy, target = statistics.reduced(context.tp_group)
        ctx.save_for_backward(hidden, weight, log_normaliser, entropy)
        ctx.context = context
        return target - log_normaliser, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, log_normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight)
        rows_gradient = hidden.new_empty(0)
        for tile in _tiles(hidden, weight, ctx.context):
            logp = tile.logits().sub_(log_normaliser[tile.tokens, None])
            grad = _logits_gradient(tile, logp, grad_logp, grad_entropy, entropy).to(weight.dtype)
            scale = 1.0 / ctx.context.temperature
            _add_product(grad_hidden[tile.tokens], grad, tile.weight, scale)
            if tile.is_first:
                rows_gradient = torch.zeros_like(tile.weight, dtype=torch.float32)
            _add_product(rows_gradient, grad.t(), tile.hidden, scale)
            if tile.is_last:
                grad_weight[tile.rows] = rows_gradient
        return grad_hidden.to(hidden.dtype), grad_weight, None


@dataclass(frozen=True, eq=False)
class _Tile:
    """Some tokens by some vocabulary rows. is_first, is_last: of the tiles with these rows."""

    tokens: slice
    rows: slice
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float
    is_first: bool
    is_last: bool

    def logits(self) -> Tensor:
        """[n, r] fp32, over the temperature, a tensor of its own."""
        out = self.hidden.new_zeros(self.hidden.shape[0], self.weight.shape[0], dtype=torch.float32)
        return _add_product(out, self.hidden, self.weight.t(), 1.0 / self.temperature)

    def targets(self) -> tuple[Tensor, Tensor]:
        """([n, 1] int64 the label's row in the tile, 0 where it is in another; [n, 1] bool where it is in this one)."""
        inside = (self.labels >= 0) & (self.labels < self.weight.shape[0])
        return (self.labels * inside)[:, None], inside[:, None]


def _tiles(hidden: Tensor, weight: Tensor, context: LogprobContext) -> Iterator[_Tile]:
    """All tiles of this rank's rows that stand for a token, those of the same rows one after the other."""
    first_row = dist.get_rank(context.tp_group) * len(weight)
    count = min(max(context.vocab_size - first_row, 0), len(weight))
    t = len(hidden)
    for row in range(0, count, context.tile_rows):
        rows = slice(row, min(row + context.tile_rows, count))
        for token in range(0, t, context.tile_tokens):
            tokens = slice(token, min(token + context.tile_tokens, t))
            yield _Tile(
                tokens=tokens,
                rows=rows,
                hidden=hidden[tokens],
                weight=weight[rows],
                labels=context.labels[tokens] - (first_row + row),
                temperature=context.temperature,
                is_first=token == 0,
                is_last=tokens.stop == t,
            )


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Running over the tiles, [t] fp32 each: m = max x, sum e^(x - m), sum e^(x - m) (x - m), and the label's x."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    target: Tensor

    @classmethod
    def empty(cls, hidden: Tensor) -> _Statistics:
        zero = hidden.new_zeros(len(hidden), dtype=torch.float32)
        # Below all logits, but finite: a rank of padding rows alone has nothing to add, and no nan.
        return cls(torch.full_like(zero, -1e30), zero, zero.clone(), zero.clone())

    def add(self, tile: _Tile, logits: Tensor) -> None:
        """Take in a tile's logits, which are overwritten."""
        maximum, total, weighted, target = (
            x[tile.tokens] for x in (self.maximum, self.total, self.weighted, self.target)
        )
        row, inside = tile.targets()
        target += (logits.gather(1, row) * inside).squeeze(1)
        highest = torch.maximum(maximum, logits.amax(1))
        self._move(maximum, total, weighted, highest)
        logits.sub_(highest[:, None])
        weights = logits.exp()
        total += weights.sum(1)
        weighted += torch.linalg.vecdot(weights, logits)

    @staticmethod
    def _move(maximum: Tensor, total: Tensor, weighted: Tensor, highest: Tensor) -> None:
        """Make sums that are relative to `maximum` relative to `highest`, in place."""
        shift = maximum - highest
        scale = shift.exp()
        weighted.add_(shift * total).mul_(scale)
        total.mul_(scale)
        maximum.copy_(highest)

    def reduced(self, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        """(log-normaliser, entropy, the label's x) over all ranks of the group."""
        highest = self.maximum.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        self._move(self.maximum, self.total, self.weighted, highest)
        sums = torch.stack([self.total, self.weighted, self.target])
        dist.all_reduce(sums, group=group)
        total, weighted, target = sums.unbind()
        return highest + total.log(), total.log() - weighted / total, target


def _logits_gradient(
    tile: _Tile, logp: Tensor, grad_logp: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """[n, r] fp32 from log p [n, r], which is overwritten: g onehot - p (g + g_H (log p + H)) for gradients g, g_H."""
    g = logp.new_zeros(len(logp)) if grad_logp is None else grad_logp[tile.tokens]
    if grad_entropy is None:
        grad = logp.exp_().mul_(-g[:, None])
    else:
        slope = logp.add(entropy[tile.tokens, None]).mul_(grad_entropy[tile.tokens, None]).add_(g[:, None])
        grad = logp.exp_().mul_(slope).neg_()
    row, inside = tile.targets()
    return grad.scatter_add_(1, row, g[:, None] * inside)


def _add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """out += scale a @ b, in place and in fp32 whatever the dtype of a and b."""
    if a.dtype is torch.float32:
        return out.addmm_(a, b, alpha=scale)
    if a.is_cuda:  # tensor cores multiply bf16 and accumulate in fp32; CPUs have no such product
        return out.add_(torch.mm(a, b, out_dtype=torch.float32), alpha=scale)
    return out.addmm_(a.float(), b.float(), alpha=scale)
