"""Log-probability and entropy of labels under a vocabulary-parallel output layer, without holding all logits.

Megatron's own cross-entropies do not serve: one overwrites fp32 logits in place, the fused one rounds gradients to
bf16, and neither knows temperature, entropy or padding rows of the vocabulary.

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
    chunk_tokens: logits of at most so many tokens live at once; bounds memory, changes no result.
    """

    labels: Tensor
    temperature: float
    vocab_size: int
    tp_group: dist.ProcessGroup
    chunk_tokens: int = 1024


def logprob_output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: LogprobContext, **_: Any
) -> Tensor:
    """GPTModel's `output_processor`: [2, t] fp32, the labels' log-probabilities and the entropies, with their graph.

    hidden_states: [t, 1, h], or [t / tp, 1, h] under sequence parallelism. output_weight: the tied embedding, if tied.
    A collective over the tensor-parallel group, in the backward pass too.
    """
    if output_layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_states, group=context.tp_group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=context.tp_group)
    weight = output_layer.weight if output_weight is None else output_weight
    return torch.stack(linear_logprob(hidden.squeeze(1), weight, context))


def linear_logprob(hidden: Tensor, weight: Tensor, context: LogprobContext) -> tuple[Tensor, Tensor]:
    """(logp [t], entropy [t]) in fp32 of softmax(hidden @ weight.T / temperature) over all ranks' rows.

    hidden [t, h], the same on all ranks of the group; weight [v, h]. The gradient of `hidden` is this rank's part:
    its sum over the group is the caller's (the backward pass of Megatron's gather or copy).
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
        rows = _Rows.of(weight, context)
        parts = [_local_statistics(rows.scaled_logits(h), *rows.targets(y)) for h, y in _chunks(hidden, context)]
        maximum, total, weighted, target = (torch.cat(values) for values in zip(*parts, strict=True))
        # Each rank's sums are relative to its own maximum: move them to the global one, then add them up.
        highest = maximum.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=context.tp_group)
        shift = maximum - highest
        scale = shift.exp()
        sums = torch.stack([total * scale, (weighted + shift * total) * scale, target])
        dist.all_reduce(sums, group=context.tp_group)
        total, weighted, target = sums.unbind()
        log_normaliser = highest + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, log_normaliser, entropy)
        ctx.context = context
        return target - log_normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_logp, grad_entropy = grads
        hidden, weight, log_normaliser, entropy = ctx.saved_tensors
        rows = _Rows.of(weight, ctx.context)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        first = 0
        for h, labels in _chunks(hidden, ctx.context):
            chunk = slice(first, first + len(h))
            column = (values[chunk, None] for values in (grad_logp, grad_entropy, log_normaliser, entropy))
            g_logp, g_entropy, normaliser, chunk_entropy = column
            logp = rows.scaled_logits(h).sub_(normaliser)
            grad = logp.exp().mul_(logp.add_(chunk_entropy).mul_(g_entropy).add_(g_logp).neg_())
            target, mine = rows.targets(labels)
            if rows.count:
                grad.scatter_add_(1, target, g_logp * mine)
            full = h.new_zeros(len(h), len(weight))
            full[:, : rows.count] = grad.div_(ctx.context.temperature)
            grad_hidden[chunk] = full @ weight
            grad_weight += full.t() @ h
            first += len(h)
        return grad_hidden, grad_weight.to(weight.dtype), None


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one rank: rows [first, first + count) of the vocabulary; further ones are padding."""

    weight: Tensor
    first: int
    count: int
    temperature: float

    @classmethod
    def of(cls, weight: Tensor, context: LogprobContext) -> _Rows:
        first = dist.get_rank(context.tp_group) * len(weight)
        count = min(max(context.vocab_size - first, 0), len(weight))
        return cls(weight, first, count, context.temperature)

    def scaled_logits(self, hidden: Tensor) -> Tensor:
        """[n, count] fp32, a tensor of its own. The product takes padding rows along: its tiles stay aligned."""
        logits = hidden @ self.weight.t()
        return logits[:, : self.count].float().div_(self.temperature)

    def targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """([n, 1] int64 the label's local row, 0 where another rank owns it; [n, 1] bool where this rank owns it)."""
        local = labels[:, None] - self.first
        mine = (local >= 0) & (local < self.count)
        return local * mine, mine


def _local_statistics(logits: Tensor, target: Tensor, mine: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[n] each, over this rank's rows: m = max x, sum e^(x - m), sum e^(x - m) (x - m), and the label's x (or 0)."""
    if not logits.shape[1]:  # a rank of padding rows alone: a maximum below all others, and nothing to add
        zero = logits.new_zeros(len(logits))
        return torch.full_like(zero, -1e30), zero, zero, zero
    chosen = (logits.gather(1, target) * mine).squeeze(1)
    maximum = logits.amax(1)
    logits.sub_(maximum[:, None])
    weights = logits.exp()
    return maximum, weights.sum(1), weights.mul_(logits).sum(1), chosen


def _chunks(hidden: Tensor, context: LogprobContext) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(hidden.split(context.chunk_tokens), context.labels.split(context.chunk_tokens), strict=True)
