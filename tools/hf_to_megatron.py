"""Convert an HF checkpoint into a Megatron distributed checkpoint that loads in any layout.

    python tools/hf_to_megatron.py --hf models/Qwen3-30B-A3B --out models/Qwen3-30B-A3B-megatron
    torchrun --nproc-per-node 8 tools/hf_to_megatron.py --hf ... --out ...     # eight ranks share the work

Memory: the largest parameter per rank, whatever the size of the model; no GPU is used. FP8 checkpoints
(weight_scale_inv) are dequantised. config.json, tokenizer and tensors that Megatron has no place for (MTP layers) go
into OUT/hf. Everything is checked before anything is written, and OUT appears whole or not at all; a second run after
an interruption starts anew. Exit code 0: done; 2: an error, in one line on stderr. See docs/checkpoints.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_gspo.convert.command import parser, run


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--hf", type=Path, required=True, help="folder of the HF checkpoint")
    options.add_argument("--out", type=Path, required=True, help="folder to make; it may be there, but empty")
    options.add_argument(
        "--dtype",
        choices=("keep", "bf16", "fp32"),
        default="keep",
        help="dtype of the parameters; keep (default): that of the HF tensors, bf16 where these are FP8",
    )
    options.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pytorch_model.bin where there is no safetensors file, with weights_only=True: nothing is executed",
    )
    args = options.parse_args(argv)

    def work() -> int:
        from megatron_gspo.convert.to_megatron import hf_to_megatron
        from megatron_gspo.convert.world import say

        size = hf_to_megatron(args.hf, args.out, dtype=args.dtype, allow_pickle=args.allow_pickle)
        say(f"{args.out}: {size / 1e9:.2f} GB of parameters")
        return 0

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
