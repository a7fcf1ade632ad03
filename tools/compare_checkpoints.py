"""Compare two checkpoints, HF or Megatron, tensor by tensor.

    python tools/compare_checkpoints.py models/Qwen3-30B-A3B models/Qwen3-30B-A3B-megatron
    python tools/compare_checkpoints.py models/before models/after --tolerance 1e-2 --any-dtype --logits

Tensors are named as HF names them, stacked experts one by one; FP8 and MXFP4 are decoded. One line for every tensor
that is missing on a side, or differs in shape, dtype or numbers, with the largest difference and the same relative to
the first checkpoint's largest number. Exit code 0: equal within the tolerance; 1: they differ; 2: an error. Memory: a
tensor of each; with --logits, one whole model in fp32 at a time. torchrun shares the tensors among its ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_gspo.convert.command import parser, run

EQUAL, DIFFERENT = 0, 1


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("one", type=Path, help="folder of a checkpoint of either kind")
    options.add_argument("other", type=Path, help="folder of a checkpoint of either kind")
    options.add_argument(
        "--hf", type=Path, help="HF checkpoint that Megatron ones came from (default: their folder hf)"
    )
    options.add_argument("--tolerance", type=float, default=0.0, help="largest relative difference that is equal")
    options.add_argument("--any-dtype", action="store_true", help="another dtype is no difference")
    options.add_argument("--logits", action="store_true", help="compare the logits on probe tokens, too")
    options.add_argument("--tokens", type=int, default=64, help="probe tokens (default 64)")
    options.add_argument("--limit", type=int, default=50, help="differences to print (default 50)")
    args = options.parse_args(argv)

    def work() -> int:
        from megatron_gspo.convert.compare import compare, logits
        from megatron_gspo.convert.sides import side
        from megatron_gspo.convert.world import say

        with side(args.one, args.hf) as one, side(args.other, args.hf) as other:
            found = compare(one, other, tolerance=args.tolerance, any_dtype=args.any_dtype)
            for difference in found[: args.limit]:
                say(str(difference))
            if len(found) > args.limit:
                say(f"... and {len(found) - args.limit} more")
            say(f"{len(one.specs)} tensors ({one.kind}) against {len(other.specs)} ({other.kind}): {len(found)} differ")
            different = bool(found)
            if args.logits:
                mine, theirs = logits(one, args.tokens), logits(other, args.tokens)
                relative = float((mine - theirs).abs().max() / mine.abs().max())
                same = float((mine.argmax(-1) == theirs.argmax(-1)).float().mean())
                say(f"logits on {args.tokens} tokens: max relative difference {relative:.3g}, same argmax {same:.1%}")
                different |= relative > max(args.tolerance, 1e-5)  # fp32 sums in another order
        return DIFFERENT if different else EQUAL

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
