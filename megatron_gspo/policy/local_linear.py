"""Grouped linears in plain torch for TEGroupedMLP: the parameter names and checkpoints of Transformer Engine's."""

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
    """`num_gemms` linears without bias, weight0 .. [out, in], over consecutive runs of rows (the tokens per expert).

    Communication between expert-tensor-parallel ranks is the token dispatcher's.
    """

    partition_dim: int
    use_bias = False

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
        assert is_expert and not bias, "only bias-free experts are built"
        self.num_gemms = num_gemms
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

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """x [n, in], n = sum(tokens_per_expert) -> [n, out]. An expert without tokens gets a gradient of zeros."""
        weights = [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]
        return _GroupedLinear.apply(x, tokens_per_expert, *weights), None

    def backward_dw(self) -> None:
        """Weight gradients are not deferred: nothing is left to do."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """One sharded tensor per expert, keyed as TEGroupedLinear's, with its (empty) extra state beside it."""
        assert metadata is not None, "dist_checkpointing passes metadata with dp_cp_group"
        experts, first = self.pgs.ep.size() * self.num_gemms, self.pgs.ep.rank() * self.num_gemms
        sharded = {}
        for i in range(self.num_gemms):
            parts = make_sharded_tensors_for_checkpoint(
                {f"{i}.weight": self.get_parameter(f"weight{i}"), f"{i}._extra_state": None},
                "",
                {f"{i}.weight": self.partition_dim},
                (*sharded_offsets, (len(sharded_offsets), first + i, experts)),
                tp_group=self.pgs.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(parts, f"{i}.", prefix)
            for part in parts.values():
                part.replica_id = (*part.replica_id[:2], self.pgs.expt_dp.rank())
            sharded[f"{prefix}weight{i}"] = parts[f"{i}.weight"]
            sharded[f"{prefix}_extra_state{i or ''}"] = parts[f"{i}._extra_state"]
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
