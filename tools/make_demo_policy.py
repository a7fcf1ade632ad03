"""Make the demo's policy: a random Qwen3-MoE of about a million parameters with a byte-level tokenizer, in HF format.

    python tools/make_demo_policy.py --out runs/demo_policy [--seed 0]

Safe to run twice: a folder that already holds the demo policy of the same seed is left alone, any other non-empty
folder is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# What identifies a finished demo policy; written last, and compared on the next run.
STAMP = "demo_policy.json"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,  # of dense layers, of which there are none; must still be a valid size
    "moe_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # With a padding id, transformers sets its embedding to zero, and RMSNorm multiplies gradients there by a thousand:
    # one sampled <pad> would be the whole gradient of its batch.
    "pad_token_id": None,
    # HF's default of 0.02 is meant for wide models; this keeps activations at unit scale: 1 / sqrt(hidden_size).
    "initializer_range": 128**-0.5,
}


def make_tokenizer() -> Any:
    """One token per UTF-8 byte (so any text can be encoded) after the special tokens; a transformers fast tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MODEL["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    """A randomly initialised fp32 Qwen3MoeForCausalLM whose vocabulary is that of `tokenizer`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        **MODEL,
    )
    return Qwen3MoeForCausalLM(config)


def is_demo_policy(out: Path, stamp: dict[str, Any]) -> bool:
    """Whether `out` holds a finished policy of exactly this stamp; ValueError if it holds anything else."""
    if not out.exists() or not any(out.iterdir()):
        return False
    path = out / STAMP
    if not path.is_file():
        raise ValueError(f"--out {out}: the folder is not empty and holds no demo policy; name another or empty it")
    found = json.loads(path.read_text())
    if found != stamp:
        raise ValueError(f"--out {out}: holds another demo policy ({found}, wanted {stamp}); name another or remove it")
    return True


def write_policy(out: Path, seed: int, stamp: dict[str, Any]) -> int:
    """Write model, tokenizer and stamp into `out`, whole or not at all; returns the number of parameters."""
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        staging.chmod(0o755)  # mkdtemp makes it private
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return model.num_parameters()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the HF checkpoint to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    args = parser.parse_args(argv)
    stamp = {"made_by": "tools/make_demo_policy.py", "seed": args.seed, "model": MODEL}
    try:
        if is_demo_policy(args.out, stamp):
            print(f"{args.out}: the demo policy is there already")
            return 0
        parameters = write_policy(args.out, args.seed, stamp)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: Qwen3-MoE with {parameters / 1e6:.2f} M parameters, {MODEL['num_experts']} experts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
