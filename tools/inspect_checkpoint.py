"""Say what a checkpoint, HF or Megatron, holds, and which rank of a layout owns what.

    python tools/inspect_checkpoint.py models/Qwen3-30B-A3B
    python tools/inspect_checkpoint.py models/Qwen3-30B-A3B --layout tp=2,pp=2,ep=8
    python tools/inspect_checkpoint.py models/Qwen3-30B-A3B --layout tp=2,pp=2,ep=8 --rank 3 --tensors

Only headers are read. Of a layout, the smallest world is shown: more ranks are replicas (data parallelism). --rank
shows one of them, parameter by parameter, with the HF tensors that it is cut from; --tensors lists the checkpoint's
own. Exit code 0: done; 2: an error, in one line on stderr. One process.
"""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path

from megatron_gspo.convert.command import parser, run


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("checkpoint", type=Path, help="folder of a checkpoint of either kind")
    options.add_argument("--hf", type=Path, help="HF checkpoint that a Megatron one came from (default: its folder hf)")
    options.add_argument("--tensors", action="store_true", help="list every tensor")
    options.add_argument("--layout", help="sizes of tp, pp, vpp, cp, ep, etp, as in tp=2,ep=4")
    options.add_argument("--rank", type=int, help="with --layout: this rank, parameter by parameter")
    args = options.parse_args(argv)
    if args.rank is not None and args.layout is None:
        options.error("--rank needs --layout")

    def work() -> int:
        from megatron_gspo.convert.sides import side
        from megatron_gspo.convert.world import world

        with world(), side(args.checkpoint, args.hf) as found:
            print_contents(found, args.tensors)
            hf_config = found.hf_config
        if args.layout:
            print_owners(hf_config, args.layout, args.rank)
        return 0

    return run(work, in_world=False)


def print_contents(found, every_tensor: bool) -> None:
    """Family, sizes and counts; with `every_tensor`, each tensor."""
    from megatron_gspo.convert.owners import parameter_counts

    specs = list(found.specs.values())
    if every_tensor:
        for spec in specs:
            print(f"{spec.name:70} {str(spec.dtype).removeprefix('torch.'):10} {list(spec.shape)}")
    files = [path for path in found.directory.iterdir() if path.suffix in (".safetensors", ".distcp")]
    counts = parameter_counts({spec.name: prod(spec.shape) for spec in specs})
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})
    largest = max(specs, key=lambda spec: spec.size_bytes)
    quantization = found.hf_config.get("quantization_config")
    print(f"{found.kind} checkpoint, family {found.hf_config['model_type']}")
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:.3f} GB")
    coded = f", stored as {quantization['quant_method']}" if quantization and found.kind == "HF" else ""
    print(f"{len(specs)} tensors, read as {', '.join(dtypes)}{coded}; largest {largest.name} {list(largest.shape)}")
    kinds = ", ".join(f"{kind} {count / 1e6:,.2f} M" for kind, count in counts.most_common())
    print(f"{sum(counts.values()) / 1e6:,.2f} M parameters: {kinds}")


def print_owners(hf_config, text: str, rank: int | None) -> None:
    """A line for every rank of one replica, or every parameter of `rank`."""
    from megatron_gspo.convert.owners import owners, parse_layout, smallest_world

    layout = parse_layout(text)
    world = smallest_world(layout)
    if rank is not None and not 0 <= rank < world:
        raise ValueError(f"--rank {rank}: the smallest world of {text} has ranks 0 to {world - 1}")
    for owner in owners(hf_config, layout, range(world) if rank is None else [rank]):
        place = " ".join(f"{name}{number}" for name, number in owner.place.items())
        print(f"rank {owner.rank} [{place}]: {owner.numel / 1e6:,.2f} M parameters; {owner.summary()}")
        if rank is not None:
            for bound in owner.bound:
                names = ", ".join(tensor.name for tensor in bound.claim.hf)
                part = f"part {bound.rank + 1} of {bound.size}" if bound.claim.rule.is_cut else "all"
                print(f"  {bound.name} {list(bound.parameter.shape)}: {part} of {names}")


if __name__ == "__main__":
    sys.exit(main())
