"""The critic: the body of the policy's model with one output per token in place of the vocabulary's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.config.schema import PolicyConfig
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.model import Model, build_model
from megatron_gspo.policy.step import Runner

# The head's parameter in every chunk that has one: no HF tensor holds it.
VALUE_HEAD = "output_layer.weight"

# (micro-batch, its number, values [t] fp32 with graph) -> (this rank's share of the loss, metrics)
ValueLossFn = Callable[[MicroBatch, int, Tensor], tuple[Tensor, dict[str, Any]]]


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to values; weight [1, h] is 0 at first, so that a new critic says 0.

    Every tensor-parallel rank holds the weight. Under sequence parallelism it sees a part of the tokens: the attribute
    `sequence_parallel` makes Megatron sum its gradient, as for the norms.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup, device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
        self._is_cut = config.sequence_parallel
        self._tp_group = tp_group

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[t] fp32 on every tensor-parallel rank, from [t, 1, h], or [t / tp, 1, h] under sequence parallelism."""
        values = F.linear(hidden_states.float(), self.weight.float()).flatten()
        if not self._is_cut:
            return values
        # All ranks compute the same loss of all t values, so the gradient of a rank's part is a slice, not a sum.
        return gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._tp_group)


def value_output_processor(*, hidden_states: Tensor, output_layer: ValueHead, **_: Any) -> Tensor:
    """GPTModel's `output_processor`: [1, t] fp32, the value of what each token ends. Collective over TP."""
    return output_layer(hidden_states)[None]


def build_value_model(hf_config: dict[str, Any], policy: PolicyConfig, layout: Layout) -> Model:
    """This rank's chunks with random parameters and a new value head; raises as `build_model` does.

    The vocabulary's output layer lives only until it is replaced. Never tied: there is no head that could share the
    embedding's parameters or its gradients.
    """
    model = build_model(hf_config | {"tie_word_embeddings": False}, policy, layout)
    for chunk in model.chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(model.config, layout.pgs.tp, chunk.output_layer.weight.device)
    return model


class ValueStepper(Runner):
    """The critic: values of what precedes each label."""

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """[t] fp32 of each micro-batch, where its labels are; an empty list off the last pipeline stage."""
        return [values for (values,) in self.score_with(_head, micro_batches)]

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFn, num_tokens: int
    ) -> list[dict]:
        """Accumulate the gradient of `loss_fn` over a mini-batch; see `Runner.forward_backward_with`."""
        return self.forward_backward_with(_head, micro_batches, loss_fn, num_tokens)


def _head(micro_batch: MicroBatch) -> tuple[Callable[..., Tensor], None]:
    return value_output_processor, None
