"""A tiny Qwen3-MoE whose parameters are a function of their global name alone, hence the same on every layout."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_gspo.batch.shard import MicroBatch, shard
from megatron_gspo.batch.trajectory import Trajectories
from megatron_gspo.config.schema import (
    BatchConfig,
    Dtype,
    LayoutConfig,
    OptimizerSection,
    PolicyConfig,
    Recipe,
    RunConfig,
)
from megatron_gspo.policy.layout import Layout

VOCAB = 50  # tp 4 pads it to 52: the last rank holds two rows that stand for no token


def hf_config(**changes: Any) -> dict[str, Any]:
    """Four layers, the second one dense."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
        **changes,
    }


def policy(megatron: dict[str, Any] | None = None, *, dtype: Dtype = Dtype.fp32, **layout: Any) -> PolicyConfig:
    """A policy section on the given layout, with the plain (not distributed) optimizer."""
    return PolicyConfig(
        hf="unused",
        dtype=dtype,
        layout=LayoutConfig(**layout),
        optimizer=OptimizerSection(lr=1e-3, distributed=False),
        megatron=megatron or {},
    )


def trajectories(lens: Sequence[int]) -> Trajectories:
    """Random tokens; the second half of every trajectory trains."""
    generator = torch.Generator().manual_seed(len(lens))
    total = sum(lens)
    return Trajectories(
        rows=torch.arange(len(lens)),
        offsets=torch.tensor([0, *lens]).cumsum(0),
        tokens=torch.randint(VOCAB, (total,), generator=generator),
        loss_mask=torch.cat([torch.arange(n) >= n // 2 for n in lens]),
        logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int64),
    )


# Eight documents in four micro-batches of 48 tokens; the last leaves 25 tokens of padding.
LENS = (20, 13, 5, 31, 2, 40, 9, 14)
MICRO_BATCHES = ((0, 1, 2), (3, 4), (5,), (6, 7))
PADDED_LENGTH = 48


def micro_batches(layout: Layout) -> list[MicroBatch]:
    """This rank's micro-batches: the four above dealt out over data parallelism."""
    held = trajectories(LENS)
    return [
        shard(held, rows, padded_length=PADDED_LENGTH, cp=layout.cp, cp_rank=layout.cp_rank)
        for rows in MICRO_BATCHES[layout.dp_rank :: layout.dp]
    ]


def fill(chunks: Sequence[GPTModel], layout: Layout) -> None:
    """Set every parameter to its part of a global tensor drawn from its name."""
    for piece in shards(chunks, layout):
        generator = np.random.default_rng(zlib.crc32(piece.key.encode()))
        # Drawn row by row, so that a vocabulary with other padding starts with the same rows.
        full = torch.from_numpy(generator.standard_normal(piece.global_shape, dtype=np.float32))
        centre = 1.0 if "norm" in piece.key else 0.0
        _local(full, piece).copy_(full[_slices(piece)].reshape(piece.data.shape) * 0.2 + centre)


def global_tensors(pieces: Sequence[dict[str, list]]) -> dict[str, Tensor]:
    """Full tensors from every rank's `local_tensors`; replicas must agree, and every element must be there."""
    full: dict[str, Tensor] = {}
    for rank_pieces in pieces:
        for key, parts in rank_pieces.items():
            for shape, slices, data in parts:
                whole = full.setdefault(key, torch.full(shape, torch.nan))
                known = whole[slices]
                torch.testing.assert_close(data.reshape(known.shape)[~known.isnan()], known[~known.isnan()])
                whole[slices] = data.reshape(known.shape)
    for key, whole in full.items():
        assert not whole.isnan().any(), f"no rank holds a part of {key}"
    return full


def local_tensors(chunks: Sequence[GPTModel], layout: Layout) -> dict[str, list]:
    """This rank's parameters: global name -> [(global shape, slices, data)]."""
    found: dict[str, list] = {}
    for piece in shards(chunks, layout):
        found.setdefault(piece.key, []).append((piece.global_shape, _slices(piece), piece.data.detach().clone()))
    return found


def gradients_as_parameters(chunks: Sequence[GPTModel]) -> None:
    """Overwrite each parameter by its gradient, so that `local_tensors` returns gradients."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)


def shards(chunks: Sequence[GPTModel], layout: Layout) -> Iterator[ShardedTensor]:
    """Megatron's own description of where each parameter stands in the global model."""
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": layout.pgs.dp_cp})
        apply_factories(state)
        yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _local(full: Tensor, piece: ShardedTensor) -> Tensor:
    assert piece.data is not None and full.shape == torch.Size(piece.global_shape)
    return piece.data.detach()


def _slices(piece: ShardedTensor) -> tuple[slice, ...]:
    shape = [1] * piece.prepend_axis_num + list(piece.local_shape)
    return tuple(slice(start, start + size) for start, size in zip(piece.global_offset, shape, strict=True))


def recipe(*, distributed: bool) -> Recipe:
    """A recipe around `policy()`, for what needs the optimizer's schedule."""
    section = replace(policy().optimizer, distributed=distributed)
    return Recipe(
        run=RunConfig(dir="unused", steps=10),
        policy=replace(policy(), optimizer=section),
        batch=BatchConfig(prompts=1),
    )
