"""Grouped linears in plain torch for TEGroupedMLP: the parameter names and checkpoints of Transformer Engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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
        _check_stride(shape, config.params_dtype)
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
        weights = torch.stack([self.get_parameter(f"weight{i}") for i in range(self.num_gemms)])
        ends = torch.tensor(tokens_per_expert).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends), None

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


def _check_stride(shape: list[int], dtype: torch.dtype) -> None:
    # grouped_mm's own error ("strides should be multiple of 16 bytes") comes at the first step and names nothing.
    for size in shape:
        if size * dtype.itemsize % 16:
            raise ValueError(
                f"an expert's local weight is {shape} in {dtype}: torch's grouped_mm needs rows of a multiple of 16 "
                f"bytes; choose hidden_size and moe_intermediate_size / etp (policy.layout.etp) accordingly"
            )
