"""Linears in plain torch that Megatron has from Transformer Engine alone: with the same parameters and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class _LocalGroupedLinear(torch.nn.Module):
    """`num_gemms` linears, weight0 .. [out, in] and perhaps bias0 .. [out], over consecutive runs of rows (the tokens
    per expert).

    Communication between expert-tensor-parallel ranks is the token dispatcher's. With biases there is one such rank:
    Megatron refuses more.
    """

    partition_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ):
        super().__init__()
        assert is_expert, "only experts are built"
        self.num_gemms, self.use_bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        self.pgs = pg_collection
        etp = pg_collection.expt_tp.size()
        shape = [output_size, input_size]
        shape[self.partition_dim] //= etp
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for i in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            weight.allreduce = not own_groups  # DDP: reduce over DP, or over expert DP
            gated = self.partition_dim == 0 and config.gated_linear_unit
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 2 if gated else 1)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                vector: Any = torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                vector.allreduce = not own_groups
                set_tensor_model_parallel_attributes(vector, self.partition_dim == 0, 0, 2 if gated else 1)
                self.register_parameter(f"bias{i}", vector)

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """x [n, in], n = sum(tokens_per_expert) -> [n, out], and the biases where the caller is to add them. An expert
        without tokens gets a gradient of zeros."""
        weights = [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]
        out = _GroupedLinear.apply(x, tokens_per_expert, *weights)
        if not self.use_bias:
            return out, None
        biases: list[Tensor] = [self.get_parameter(f"bias{i}") for i in range(self.num_gemms)]
        if self.skip_bias_add:
            return out, biases
        rows = torch.tensor(tokens_per_expert)
        return out + torch.stack(biases).repeat_interleave(rows, 0, output_size=len(x)), None

    def backward_dw(self) -> None:
        """Weight gradients are not deferred: nothing is left to do."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """One sharded tensor per expert, keyed as TEGroupedLinear's, with its (empty) extra state beside it."""
        assert metadata is not None, "dist_checkpointing passes metadata with dp_cp_group"
        experts, first = self.pgs.ep.size() * self.num_gemms, self.pgs.ep.rank() * self.num_gemms
        sharded = {}
        for i in range(self.num_gemms):
            held: dict[str, Any] = {f"{i}.weight": self.get_parameter(f"weight{i}"), f"{i}._extra_state": None}
            cuts = {f"{i}.weight": self.partition_dim}
            if self.use_bias:
                held[f"{i}.bias"] = self.get_parameter(f"bias{i}")
                if self.partition_dim == 0:
                    cuts[f"{i}.bias"] = 0
            parts = make_sharded_tensors_for_checkpoint(
                held,
                "",
                cuts,
                (*sharded_offsets, (len(sharded_offsets), first + i, experts)),
                tp_group=self.pgs.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(parts, f"{i}.", prefix)
            for part in parts.values():
                part.replica_id = (*part.replica_id[:2], self.pgs.expt_dp.rank())
            sharded[f"{prefix}weight{i}"] = parts[f"{i}.weight"]
            sharded[f"{prefix}_extra_state{i or ''}"] = parts[f"{i}._extra_state"]
            if self.use_bias:
                sharded[f"{prefix}bias{i}"] = parts[f"{i}.bias"]
        return sharded

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        # Extra states exist for the sake of the checkpoint format alone.
        for name in [name for name in state_dict if name.startswith(f"{prefix}_extra_state")]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)


class LocalColumnGroupedLinear(_LocalGroupedLinear):
    """Grouped linear whose outputs are cut over expert tensor parallelism (an expert's fc1)."""

    partition_dim = 0


class LocalRowGroupedLinear(_LocalGroupedLinear):
    """Grouped linear whose inputs are cut over expert tensor parallelism (an expert's fc2)."""

    partition_dim = 1


class LocalReplicatedLinear(torch.nn.Module):
    """A linear without bias that every tensor-parallel rank holds whole, over the tokens that it has (MLA's projections
    to latents): Transformer Engine's with parallel_mode "duplicated"."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        parallel_mode: str,
        **_: Any,
    ):
        super().__init__()
        assert parallel_mode == "duplicated" and not bias, "only whole weights without bias are built"
        weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(weight)
        weight.allreduce = True
        weight.sequence_parallel = config.sequence_parallel  # its gradient is summed over TP ranks
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., in] -> [..., out]."""
        return torch.nn.functional.linear(x, self.weight), None


class _GroupedLinear(torch.autograd.Function):
    """One product per run of rows, written in place: no concatenation, and no limit on strides as F.grouped_mm has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.rows = rows
        out = x.new_empty(len(x), len(weights[0]))
        for target, source, weight in zip(out.split(rows), x.split(rows), weights, strict=True):
            torch.mm(source, weight.t(), out=target)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        x, *weights = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        for target, source, weight in zip(grad_x.split(ctx.rows), grad_out.split(ctx.rows), weights, strict=True):
            torch.mm(source, weight, out=target)
        runs = zip(grad_out.split(ctx.rows), x.split(ctx.rows), strict=True)
        return grad_x, None, *[grad.t() @ tokens for grad, tokens in runs]
