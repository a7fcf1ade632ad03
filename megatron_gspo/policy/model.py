"""A rank's share of a model: bare GPTModel chunks from an HF config, and their wrapping for training or scoring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_gspo.config.schema import Mtp, PolicyConfig
from megatron_gspo.policy import mtp, router_loss
from megatron_gspo.policy.all_heads_norm import norm_all_heads
from megatron_gspo.policy.cpu import on_gpu
from megatron_gspo.policy.expert_bias import freeze_expert_bias, half_precision
from megatron_gspo.policy.latent_attention import latent_attention
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.local_spec import local_block_spec
from megatron_gspo.policy.overrides import checked_overrides
from megatron_gspo.policy.rotary import install_rotary
from megatron_gspo.policy.transformer_config import transformer_config
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.families.family import Architecture


@dataclass(frozen=True)
class Model:
    """The chunks that one rank holds (several with virtual pipeline stages) and what they were built from.

    Rows `vocab_size` to `padded_vocab_size` of the embedding and the output layer stand for no token.
    """

    chunks: list[GPTModel]
    config: TransformerConfig
    hf_config: dict[str, Any]
    vocab_size: int
    padded_vocab_size: int


def read_hf_config(directory: str, key: str) -> dict[str, Any]:
    """config.json of the HF checkpoint that the recipe's `key` names. Raises ValueError where there is none."""
    path = Path(directory) / "config.json"
    if not path.exists():
        raise ValueError(f"{key}: {path} does not exist; expected the directory of an HF checkpoint")
    return json.loads(path.read_text())


def check_vocabulary(hf_config: dict[str, Any], key: str, policy_directory: str) -> None:
    """Raise ValueError where the model that `key` names does not read the policy's token ids."""
    ours, policy = hf_config["vocab_size"], read_hf_config(policy_directory, "policy.hf")["vocab_size"]
    if ours != policy:
        raise ValueError(
            f"{key}: its vocab_size is {ours}, that of policy.hf {policy}; name a checkpoint that has its tokenizer"
        )


def build_model(hf_config: dict[str, Any], policy: PolicyConfig, layout: Layout) -> Model:
    """Build this rank's chunks with random parameters.

    Random parameters depend on the layout (each rank draws its own shard): load weights for anything comparable.
    Raises ValueError for HF features that are not built and for refused `policy.megatron` fields.
    """
    router_loss.install()
    architecture = family_for(hf_config).architecture(hf_config)
    further = family_for(hf_config).trained_further(hf_config) if policy.mtp is Mtp.train else range(0)
    config = transformer_config(architecture, policy, layout, num_further=len(further))
    if further:
        mtp.install()
    padded = padded_vocab_size(hf_config["vocab_size"], layout.tp)
    chunks = []
    for chunk in range(layout.vpp):
        vp_stage = chunk if layout.vpp > 1 else None
        spec = layer_spec(config, architecture, layout, vp_stage)
        model = GPTModel(
            config,
            spec,
            vocab_size=padded,
            max_sequence_length=hf_config["max_position_embeddings"],
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope" if architecture.rope is not None else "none",
            pre_process=layout.is_first_stage and chunk == 0,
            post_process=layout.is_last_stage and chunk == layout.vpp - 1,
            parallel_output=True,
            vp_stage=vp_stage,
            pg_collection=layout.pgs,
            mtp_block_spec=mtp.block_spec(config, spec, vp_stage) if further else None,
        )
        if architecture.rope is not None:
            install_rotary(model, architecture.rope)
        _mark_sinks(model)
        freeze_expert_bias(model)
        chunks.append(model.cuda() if on_gpu() else model)
    return Model(chunks, config, hf_config, hf_config["vocab_size"], padded)


def layer_spec(
    config: TransformerConfig, architecture: Architecture, layout: Layout, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The block spec: Transformer Engine's modules on a GPU, their local twins on a CPU; then what a family changes."""
    if on_gpu():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        spec = local_block_spec(config, vp_stage)
    if architecture.norm_all_heads:
        norm_all_heads(spec.layer_specs, config, layout.pgs.tp)
    if architecture.latent_norm_eps is not None:
        latent_attention(spec.layer_specs, architecture.latent_norm_eps)
    return spec


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Smallest multiple of tp (of 128 x tp on a GPU, for its GEMM tiles) that holds `vocab_size` rows."""
    multiple = tp * (128 if on_gpu() else 1)
    return -(-vocab_size // multiple) * multiple


def ddp_config(policy: PolicyConfig) -> DistributedDataParallelConfig:
    """Gradients are summed (not averaged) over DP x CP in fp32. Raises ValueError for refused `policy.ddp` fields."""
    fixed = {"use_distributed_optimizer": policy.optimizer.distributed}
    derived = {
        "use_distributed_optimizer": "set it through policy.optimizer.distributed",
        "use_megatron_fsdp": "weights are loaded and exported through Megatron's own parameters",
        "average_in_collective": "gradients are summed: the objective has divided by global denominators",
    }
    overrides = checked_overrides(DistributedDataParallelConfig, policy.ddp, derived, "policy.ddp")
    return DistributedDataParallelConfig(**({"grad_reduce_in_fp32": True} | fixed | overrides))


def wrap(model: Model, ddp: DistributedDataParallelConfig, layout: Layout) -> list[DistributedDataParallel]:
    """The chunks in Megatron's DDP, in Float16Module below it for bf16. Parameters become views of DDP's buffers.

    Connects Megatron's schedules to them through `model.config`: gradients are finalized at the end of each pass.
    """
    wrapped = []
    for number, module in enumerate(_in_precision(model)):
        # The schedule finishes the backward pass of later chunks first: their reduction is off the critical path.
        wrapped.append(
            DistributedDataParallel(model.config, ddp, module, disable_bucketing=number > 0, pg_collection=layout.pgs)
        )
    config: Any = model.config
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _per_chunk([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _per_chunk([chunk.start_grad_sync for chunk in wrapped])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = _per_chunk([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def freeze(model: Model) -> list[torch.nn.Module]:
    """The chunks for scoring alone, in the precision that `wrap` gives them: no gradients and no buffers for them."""
    frozen = _in_precision(model)
    for chunk in frozen:
        chunk.requires_grad_(False)
    return frozen


def sync_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Bring every parameter up to date. Collective over data parallelism; call before reading weights.

    With overlap_param_gather, parameters stay those of the step before until the next forward pass gathers them.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def stage_padding_mask(chunk: torch.nn.Module, mask: Tensor, layout: Layout) -> Tensor:
    """The padding mask [1, t] bool as `chunk` wants it: cut over sequence parallelism beyond the first stage.

    GPTModel cuts it only where it also embeds; the router of any later chunk would see a mask of the wrong length.
    """
    if layout.tp == 1 or get_attr_wrapped_model(chunk, "pre_process"):
        return mask
    return tensor_parallel.scatter_to_sequence_parallel_region(mask.transpose(0, 1), group=layout.pgs.tp).transpose(
        0, 1
    )


def _in_precision(model: Model) -> list[torch.nn.Module]:
    return [half_precision(model.config, chunk) if model.config.bf16 else chunk for chunk in model.chunks]


def _per_chunk(functions: list[Any]) -> Any:
    """What the schedules expect: a list with several chunks, the function itself with one."""
    return functions if len(functions) > 1 else functions[0]


def _mark_sinks(model: GPTModel) -> None:
    """Say that attention sinks are cut over TP: unmarked, only those of the first rank count in the gradient's norm."""
    for module in model.modules():
        sinks = getattr(module, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter):
            tensor_parallel.set_tensor_model_parallel_attributes(sinks, True, 0, 1)
