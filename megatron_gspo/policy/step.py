"""Score and update: one pass of micro-batches through Megatron's own pipeline schedule, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.policy import mtp
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.logprob import LogprobContext, logprob_output_processor
from megatron_gspo.policy.model import Model, stage_padding_mask
from megatron_gspo.policy.routing import RoutingWatch

# (micro-batch, its number, logp [t] fp32 with graph, entropy [t] fp32) -> (this rank's share of the loss, metrics)
LossFn = Callable[[MicroBatch, int, Tensor, Tensor], tuple[Tensor, dict[str, Any]]]
# micro-batch -> (GPTModel's `output_processor`, its context): what the last stage makes of hidden states, [k, t] fp32
Head = Callable[[MicroBatch], tuple[Callable[..., Tensor], Any]]


class NonFiniteGradient(RuntimeError):
    """The gradient norm of a model's mini-batch is nan or inf; none of its parameters was changed."""


class Runner:
    """Runs one rank's chunks of a model, whose last stage ends in some head; every method is a collective.

    chunks: from `wrap`, or from `freeze` for scoring alone. routing: watches the routers of these chunks.
    """

    def __init__(self, model: Model, chunks: Sequence[Any], layout: Layout, routing: RoutingWatch | None = None):
        self.model = model
        self.chunks = list(chunks)
        self.layout = layout
        self.routing = routing

    @torch.no_grad()
    def score_with(self, head: Head, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, ...]]:
        """The head's k outputs, [t] fp32 each, for every micro-batch; an empty list off the last pipeline stage.

        Uses the chunks in the mode and layout of the update, so that an unchanged model gives unchanged numbers.
        """

        def keep(micro_batch: MicroBatch, number: int, output: Tensor):
            return output.new_zeros(()), _no_tokens(output), output.unbind()

        return self._run(head, micro_batches, keep, forward_only=True)

    def forward_backward_with(
        self, head: Head, micro_batches: Sequence[MicroBatch], loss_fn: Callable, num_tokens: int
    ) -> list[dict]:
        """Accumulate the gradient of `loss_fn` over a mini-batch; returns its metrics on the last stage, [] elsewhere.

        loss_fn(micro-batch, its number, *outputs of the head) -> (this rank's share of the loss, metrics). The losses
        must already be divided by their global denominators: Megatron then sums gradients over DP x CP and divides by
        the token count that the loss function returns, which is 0 (clamped to 1) for that reason.
        `num_tokens` (all non-padding tokens of the mini-batch, over all ranks) scales the router's own losses.
        """

        def loss(micro_batch: MicroBatch, number: int, output: Tensor):
            value, metrics = loss_fn(micro_batch, number, *output.unbind())
            return value, _no_tokens(output), metrics

        def router_scale() -> Tensor:
            # Megatron keeps the first scale that any model gives and overwrites it in place by all later ones: a new
            # tensor each time, in the shape of its own default, which a model that only scores gives.
            return torch.full((1,), 1.0 / max(num_tokens, 1))

        self.model.config.moe_grad_scale_func = router_scale
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        return self._run(head, micro_batches, loss, forward_only=False)

    def _run(self, head: Head, micro_batches: Sequence[MicroBatch], loss: Callable, *, forward_only: bool) -> list:
        iterators = [iter(enumerate(micro_batches)) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, head, loss),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.shape[1] * self.layout.cp,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward_step(self, head: Head, loss: Callable, iterator: Iterator, chunk: torch.nn.Module):
        number, micro_batch = next(iterator)
        processor, context = head(micro_batch)
        with self.routing.forward(micro_batch) if self.routing else nullcontext():
            output = chunk(
                micro_batch.tokens,
                micro_batch.position_ids,
                None,
                packed_seq_params=_packed_seq_params(micro_batch),
                padding_mask=stage_padding_mask(chunk, micro_batch.padding_mask, self.layout),
                output_processor=processor,
                output_processor_context=context,
            )
        return output, partial(loss, micro_batch, number)


class Stepper(Runner):
    """The policy: log-probabilities and entropies at a sampling temperature."""

    def __init__(
        self,
        model: Model,
        chunks: Sequence[Any],
        layout: Layout,
        temperature: float,
        routing: RoutingWatch | None = None,
    ):
        super().__init__(model, chunks, layout, routing)
        self.temperature = temperature

    def score(
        self, micro_batches: Sequence[MicroBatch], temperature: float | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """(logp [t], entropy [t]) in fp32 of each micro-batch's labels; an empty list off the last pipeline stage.

        `temperature` stands in for the stepper's own.
        """
        scored = self.score_with(self._head(temperature or self.temperature), micro_batches)
        return [(logp, entropy) for logp, entropy in scored]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, num_tokens: int) -> list[dict]:
        """Accumulate the gradient of `loss_fn` over a mini-batch; see `Runner.forward_backward_with`.

        Multi-token-prediction layers, where the model has them, get that of their own loss.
        """
        config, head = self.model.config, self._head(self.temperature)
        if not config.mtp_num_layers:
            return self.forward_backward_with(head, micro_batches, loss_fn, num_tokens)
        assert config.mtp_loss_scaling_factor is not None
        trained = mtp.count_trained(micro_batches, self.layout.pgs.dp_cp)
        loss_fn = mtp.with_further(loss_fn, config.mtp_loss_scaling_factor, trained)
        return self.forward_backward_with(self._with_further(head), micro_batches, loss_fn, num_tokens)

    def _with_further(self, head: Head) -> Head:
        def with_further(micro_batch: MicroBatch) -> tuple[Callable[..., Tensor], mtp.FurtherContext]:
            _, context = head(micro_batch)
            return mtp.further_output_processor, mtp.FurtherContext(context, micro_batch.loss_mask, self.layout.pgs.cp)

        return with_further

    def _head(self, temperature: float) -> Head:
        def head(micro_batch: MicroBatch) -> tuple[Callable[..., Tensor], LogprobContext]:
            return logprob_output_processor, LogprobContext(
                labels=micro_batch.labels,
                temperature=temperature,
                vocab_size=self.model.vocab_size,
                tp_group=self.layout.pgs.tp,
            )

        return head


def apply_gradients(optimizer, scheduler, *, skip_non_finite: bool, what: str) -> tuple[float, float, bool]:
    """One optimizer and scheduler step; returns (gradient norm before clipping, learning rate used, applied).

    A non-finite gradient norm (it is the same number on all ranks) leaves every parameter and optimizer state of the
    model as it is: it raises NonFiniteGradient naming `what` model, or is skipped and reported when `skip_non_finite`.
    """
    lr = optimizer.param_groups[0]["lr"]
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    # Multi-token-prediction layers: Megatron leaves their gradients out of the norm and clips them by one of their own.
    others = optimizer._compute_grad_norms_by_group().values()
    if not all(math.isfinite(x) for x in (norm, *others)):
        if skip_non_finite:
            optimizer.zero_grad()
            return norm, lr, False
        raise NonFiniteGradient(
            f"gradient norm of the {what} is {', '.join(map(str, (norm, *others)))}; none of its parameters was "
            "changed. The batch is in the run folder under rollouts/; set run.on_non_finite: skip to drop such steps"
        )
    applied, norm, _ = optimizer.step()
    scheduler.step(increment=1)
    # Without the distributed optimizer a parameter's .grad is DDP's buffer: left there, the next backward pass would
    # add that buffer to itself.
    optimizer.zero_grad()
    return float(norm), lr, bool(applied)


def leave_gradients(optimizer) -> tuple[float, float, bool]:
    """What `apply_gradients` is for a mini-batch in which no token trains: momentum and decay move nothing either."""
    optimizer.zero_grad()
    return 0.0, optimizer.param_groups[0]["lr"], False


def _no_tokens(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int, device=like.device)


def _packed_seq_params(micro_batch: MicroBatch) -> PackedSeqParams:
    bounds = micro_batch.cu_seqlens
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
