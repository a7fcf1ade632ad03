"""Export of a 390 M-parameter Qwen3-MoE in bf16 from TP2 x EP2, and load into it, against memory and gloo.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/export.py [--rounds 5] [--lot-mb 64]

GB/s are bytes of the whole HF checkpoint over seconds, barrier to barrier; the median of the rounds, in which all are
measured in turn. export: every HF tensor assembled on its sender, in lots of --lot-mb, and copied into memory that is
held, as weight sync does. save: the same into synced safetensors files. load: `load_hf` from files in the page cache.
memcpy: each rank copies its half of as many bytes into memory that it holds. gather, all-gather, broadcast: gloo, as
many bytes in messages of --lot-mb, from memory that is held to memory that is held. peak: what the first rank's memory
grows by at the most during an export.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.convert import config, make_model
from megatron_gspo.policy import cpu

SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def seconds(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def memory_mb(field: str) -> float:
    """A field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def peers(size: int, lot: int) -> dict[str, Callable[[], object]]:
    """The limits: `size` bytes through memory or gloo."""
    world, rank = dist.get_world_size(), dist.get_rank()
    source, target = (torch.ones(lot // world, dtype=torch.uint8) for _ in range(2))
    parts = [torch.ones(lot // world, dtype=torch.uint8) for _ in range(world)]
    whole = torch.ones(lot, dtype=torch.uint8)
    times = range(size // lot)
    return {
        "memcpy": lambda: [target.copy_(source) for _ in times],
        "gather": lambda: [dist.gather(source, parts if i % world == rank else None, dst=i % world) for i in times],
        "all-gather": lambda: [dist.all_gather(parts, source) for _ in times],
        "broadcast": lambda: [dist.broadcast(whole, src=i % world) for i in times],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--lot-mb", type=int, default=64)
    args = options.parse_args()
    cpu.install()
    from megatron_gspo.config.schema import Dtype, LayoutConfig, OptimizerSection, PolicyConfig
    from megatron_gspo.policy.layout import init_layout
    from megatron_gspo.policy.model import build_model
    from megatron_gspo.weights.bind import bind
    from megatron_gspo.weights.export import buckets, gather, plan_export
    from megatron_gspo.weights.load import load_hf
    from megatron_gspo.weights.save import save_hf

    dist.init_process_group("gloo")
    first, hf_config = dist.get_rank() == 0, config(8) | SIZES
    names: list[str | None] = [tempfile.mkdtemp(dir=".") if first else None]
    dist.broadcast_object_list(names)
    folder = Path(str(names[0]))
    try:
        size = make_model(folder / "hf", hf_config) if first else 0
        sizes: list[int] = [size]
        dist.broadcast_object_list(sizes)
        layout_config = LayoutConfig(tp=2, ep=2)
        layout = init_layout(layout_config)
        policy = PolicyConfig(hf="", dtype=Dtype.bf16, layout=layout_config, optimizer=OptimizerSection(lr=0.0))
        model = build_model(hf_config, policy, layout)
        binding = bind(model.chunks, hf_config, layout.pgs)
        load_hf(folder / "hf", binding)
        plan = plan_export(binding)
        lots = buckets(plan, args.lot_mb * 2**20)
        largest = max(item.size_bytes for item in plan.items)

        def save() -> None:
            save_hf(folder / "out", plan, folder / "hf")
            if first:
                shutil.rmtree(folder / "out")

        held = torch.ones(max(lot.size_bytes for lot in lots), dtype=torch.uint8)

        def export() -> None:
            for lot in lots:
                start = 0
                for _, tensor in gather(lot):
                    held[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                    start += tensor.nbytes

        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins at what is used now
        before = memory_mb("VmRSS")
        export()
        peak = memory_mb("VmHWM") - before
        steps: dict[str, Callable[[], object]] = {
            "export": export,
            "save": save,
            "load": lambda: load_hf(folder / "hf", binding),
            **peers(sizes[0], args.lot_mb * 2**20),
        }
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(args.rounds):
            for name, step in steps.items():
                found[name].append(sizes[0] / 1e9 / seconds(step))
        if first:
            load = f"load {os.getloadavg()[0]:.1f}"
            print(f"{sizes[0] / 2e6:.0f} M parameters, largest tensor(s) of a parameter {largest / 1e6:.0f} MB, {load}")
            print(f"peak of an export: {peak:.0f} MB more on the first rank")
            for name, rates in found.items():
                print(f"{name:>10}: {statistics.median(rates):6.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})")
    finally:
        dist.barrier()
        if first:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
