"""Convert a Megatron distributed checkpoint, written on any layout, into an HF checkpoint.

    python tools/megatron_to_hf.py --megatron models/Qwen3-30B-A3B-megatron --out models/out
    python tools/megatron_to_hf.py --megatron runs/my_run/checkpoints/step_000100_000/policy \\
        --hf models/Qwen3-30B-A3B --out models/step_100 --dtype bf16
    torchrun --nproc-per-node 8 tools/megatron_to_hf.py --megatron ... --out ...     # eight ranks share the work

A training checkpoint may be given: optimizer state is left out. config.json, tokenizer, generation config and MTP
layers come from --hf, by default from MEGATRON/hf, which hf_to_megatron.py makes. Memory: the largest parameter twice
per rank. Nothing in a checkpoint is executed, pickles included. OUT appears whole or not at all. Exit code 0: done;
2: an error, in one line on stderr. See docs/checkpoints.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_gspo.convert.command import parser, run


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--megatron", type=Path, required=True, help="folder with .metadata and the .distcp files")
    options.add_argument("--out", type=Path, required=True, help="folder to make; it may be there, but empty")
    options.add_argument("--hf", type=Path, help="HF checkpoint that the model came from (default: MEGATRON/hf)")
    options.add_argument(
        "--dtype",
        choices=("keep", "bf16", "fp32", "fp8"),
        default="keep",
        help="keep (default): as stored; fp8: linear layers in blocks of 128 x 128 with weight_scale_inv, all else "
        "bf16. Expert biases of routers stay fp32",
    )
    args = options.parse_args(argv)

    def work() -> int:
        from megatron_gspo.convert.to_hf import megatron_to_hf
        from megatron_gspo.convert.world import say

        size = megatron_to_hf(args.megatron, args.out, hf=args.hf, dtype=args.dtype)
        say(f"{args.out}: {size / 1e9:.2f} GB of tensors")
        return 0

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
