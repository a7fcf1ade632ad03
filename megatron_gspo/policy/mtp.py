"""Multi-token-prediction layers that learn what the policy samples and never move it (`policy.mtp: train`).

Each reads the policy's last hidden states and its embedding as constants, and predicts one token further through its
output layer, a constant too. Megatron builds them; its loss is not used. Megatron-Core 0.19.2 (`process_mtp_loss`)
weighs a token by the trained tokens of its own micro-batch and context-parallel rank, and knows no temperature: other
cuts of a mini-batch would give other gradients. Here the policy's own output processor computes the log-probabilities,
and the loss is divided by the trained tokens of the whole mini-batch (arXiv 2412.19437, equation 24).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_model
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    roll_tensor,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.objective.metrics import TokenMean
from megatron_gspo.policy.cpu import MEGATRON_VERSION, on_gpu
from megatron_gspo.policy.local_spec import LocalNorm
from megatron_gspo.policy.logprob import LogprobContext, logprob_output_processor


class FurtherLayers(MultiTokenPredictionBlock):
    """All multi-token-prediction layers. Where nothing trains (scoring) they are left out."""

    def forward(self, *, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """[(1 + layers) x t, 1, h] from hidden_states [t, 1, h], which come first; hidden_states without gradients."""
        return super().forward(hidden_states=hidden_states, **inputs) if torch.is_grad_enabled() else hidden_states


class FurtherLayer(MultiTokenPredictionLayer):
    """Its router counts as padding the places that are. Megatron would shift the mask with the tokens, also where
    sequence parallelism has cut it to places that `cu_seqlens` does not describe."""

    def _get_embeddings(self, *, padding_mask: Tensor | None = None, **inputs: Any) -> tuple[Tensor | None, ...]:
        tokens, positions, _, embedded, hidden = super()._get_embeddings(**inputs)
        return tokens, positions, padding_mask, embedded, hidden


def install() -> None:
    """Give GPTModel the block above, and leave its outputs to the output processor; harmless when done twice.

    Raises RuntimeError for another Megatron-Core than the one that this was read against.
    """
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise RuntimeError(f"megatron-core {found} is installed, but policy/mtp.py patches {MEGATRON_VERSION} only")
    patched: Any = gpt_model
    patched.MultiTokenPredictionBlock = FurtherLayers
    patched.process_mtp_loss = lambda hidden_states, **_: hidden_states


def block_spec(
    config: TransformerConfig, decoder: TransformerBlockSubmodules, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Layers like the last of `decoder`, the chunk's own; None for a chunk that holds none."""
    spec = get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=on_gpu(), vp_stage=vp_stage)
    if spec is None:
        return None
    for layer in spec.layer_specs:
        layer.module = FurtherLayer
        if not on_gpu():
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = LocalNorm
    return spec


@dataclass(frozen=True, eq=False)
class FurtherContext:
    """For `further_output_processor`. loss_mask [t] bool: the labels of `logprob` that train."""

    logprob: LogprobContext
    loss_mask: Tensor
    cp_group: dist.ProcessGroup


def further_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: FurtherContext,
    config: TransformerConfig,
    packed_seq_params: PackedSeqParams,
    **_: Any,
) -> Tensor:
    """GPTModel's `output_processor`: [2 + 2 x layers, t] fp32. Two rows are those of `logprob_output_processor`, then
    two for every layer: log-probabilities of tokens further on, 0 where these do not train, and whether they train.

    A collective over the tensor-parallel and the context-parallel group, in the backward pass over the former.
    """
    assert config.mtp_num_layers is not None
    hidden, *further = hidden_states.chunk(1 + config.mtp_num_layers)
    fixed = (output_layer.weight if output_weight is None else output_weight).detach()
    rows = [
        logprob_output_processor(
            hidden_states=hidden, output_layer=output_layer, output_weight=output_weight, context=context.logprob
        )
    ]
    labels = torch.stack([context.logprob.labels, context.loss_mask.long()])
    for states in further:
        labels, _ = roll_tensor(labels, cp_group=context.cp_group, packed_seq_params=packed_seq_params)
        logp, _ = logprob_output_processor(
            hidden_states=states,
            output_layer=output_layer,
            output_weight=fixed,
            context=replace(context.logprob, labels=labels[0]),
        )
        rows.append(torch.stack([torch.where(labels[1].bool(), logp, 0.0), labels[1].float()]))
    return torch.cat(rows)


def with_further(loss_fn: Callable, weight: float, num_tokens: int) -> Callable:
    """`loss_fn` of (micro-batch, number, logp, entropy), for the rows of `further_output_processor`, plus `weight`
    times the mean over layers of -(1/num_tokens) sum of their log-probabilities."""

    def loss(micro_batch: MicroBatch, number: int, logp: Tensor, entropy: Tensor, *further: Tensor):
        value, metrics = loss_fn(micro_batch, number, logp, entropy)
        nll, trains = -torch.stack(further[::2]).double(), torch.stack(further[1::2]).double()
        metric = TokenMean(nll.detach().sum(), trains.sum())
        share = weight * nll.sum() / (len(nll) * max(num_tokens, 1))
        return value + share, metrics | {"mtp_nll": metric}

    return loss


def count_trained(micro_batches: Sequence[MicroBatch], group: dist.ProcessGroup) -> int:
    """Trained tokens of a mini-batch over all ranks. Collective over `group`, data and context parallelism."""
    count = torch.stack([micro_batch.loss_mask.sum() for micro_batch in micro_batches]).sum()
    dist.all_reduce(count, group=group)
    return int(count)
