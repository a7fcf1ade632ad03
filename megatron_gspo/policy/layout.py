"""The parallel layout of one trainer rank: Megatron's process groups, their sizes and this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gspo.config.schema import LayoutConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions, this rank's number in each, and the groups that span them."""

    pgs: ProcessGroupCollection
    world: int
    rank: int
    dp: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    etp_rank: int
    pipeline_layout: str | None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding (its first model chunk does)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer (its last model chunk does), and hence log-probabilities."""
        return self.pp_rank == self.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's own pipeline."""
        return dist.get_global_rank(self.pgs.pp, self.pp - 1)

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between tensor-parallel regions are cut along the sequence; Megatron's MoE needs it."""
        return self.tp > 1


def init_layout(cfg: LayoutConfig, *, seed: int = 0, timeout_s: float = 1800.0) -> Layout:
    """Create all process groups over the default group and seed the tensor-parallel RNG; a collective over all ranks.

    `timeout_s`: seconds after which a collective that some rank did not join fails.
    Raises ValueError when the world is not a multiple of the model-parallel sizes.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    _check_divides(world, {"tp": cfg.tp, "pp": cfg.pp, "cp": cfg.cp})
    _check_divides(world, {"etp": cfg.etp, "ep": cfg.ep, "pp": cfg.pp})
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tp,
        pipeline_model_parallel_size=cfg.pp,
        virtual_pipeline_model_parallel_size=cfg.vpp if cfg.vpp > 1 else None,
        context_parallel_size=cfg.cp,
        expert_model_parallel_size=cfg.ep,
        expert_tensor_parallel_size=cfg.etp,  # Megatron's default is tp, not 1
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,  # only Megatron's own gather-to-rank-0 checkpoints use them
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    pgs = ProcessGroupCollection.use_mpu_process_groups()
    return Layout(
        pgs=pgs,
        world=world,
        rank=rank,
        dp=pgs.dp.size(),
        tp=cfg.tp,
        pp=cfg.pp,
        vpp=cfg.vpp,
        cp=cfg.cp,
        ep=cfg.ep,
        etp=cfg.etp,
        dp_rank=pgs.dp.rank(),
        tp_rank=pgs.tp.rank(),
        pp_rank=pgs.pp.rank(),
        cp_rank=pgs.cp.rank(),
        ep_rank=pgs.ep.rank(),
        etp_rank=pgs.expt_tp.rank(),
        pipeline_layout=cfg.pipeline_layout,
    )


def _check_divides(world: int, sizes: dict[str, int]) -> None:
    product = 1
    for size in sizes.values():
        product *= size
    if world % product:
        asked = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"policy.layout: {asked} = {product} does not divide the {world} trainer ranks; "
            f"change the layout or start a multiple of {product} ranks"
        )
