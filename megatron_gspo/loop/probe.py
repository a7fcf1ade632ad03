"""The probe: one real sequence that trainer and rollout engine both score after every weight update."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoTokenizer

from megatron_gspo.batch.pack import MiniBatch, Plan
from megatron_gspo.config import Recipe
from megatron_gspo.data import make_source, tokenize
from megatron_gspo.loop.cut import cut_batch, gather_tokens
from megatron_gspo.loop.given import assemble
from megatron_gspo.loop.source import GivenBatch
from megatron_gspo.policy.layout import Layout
from megatron_gspo.policy.step import Stepper

PROBE_TOKENS = 64
REPLICA_TOLERANCE = 1e-2  # replicas run the same kernels on the same weights; a GPU may add in another order


def probe_tokens(recipe: Recipe) -> Tensor:
    """[k] int64: the first prompts of the run's data, one after the other; the same on all ranks.

    k is PROBE_TOKENS, or data.max_prompt_tokens where the servers' context is made for less.
    """
    tokenizer = AutoTokenizer.from_pretrained(recipe.policy.hf)
    source = make_source(recipe.data, recipe.run.seed, tokenizer)
    ids: list[int] = []
    for prompt in source.batch(0, PROBE_TOKENS):
        ids += tokenize(prompt.prompt, tokenizer)
    return torch.tensor(ids[: min(PROBE_TOKENS, recipe.data.max_prompt_tokens)])


def score_probe(stepper: Stepper, tokens: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """[k-1] float32 on every rank: the trainer's log-probability of tokens[1:] at temperature 1. Collective.

    Every DP rank scores a copy of its own, since expert parallelism spans DP; they must agree with the first.
    """
    per_rank = layout.pp if layout.vpp > 1 else 1
    copies = layout.dp * per_rank
    index, trajectories = assemble([tokens[:1]] * copies, [tokens[1:]] * copies)
    multiple = 2 * layout.cp * layout.tp
    plan = Plan(
        mini_batches=(
            MiniBatch(
                rows=tuple(range(copies)),
                padded_length=-(-len(tokens) // multiple) * multiple,
                micro_batches=tuple(
                    tuple((dp_rank * per_rank + k,) for k in range(per_rank)) for dp_rank in range(layout.dp)
                ),
            ),
        )
    )
    cuts = cut_batch(GivenBatch(index, trajectories), plan, layout, device)
    scored = [[logp for logp, _ in stepper.score(cut.micro_batches, temperature=1.0)] for cut in cuts]
    logp = gather_tokens(cuts, scored, index, layout).view(copies, -1)[:, 1:]
    apart = (logp - logp[0]).abs().max().item()
    if not apart <= REPLICA_TOLERANCE:
        raise RuntimeError(f"data-parallel replicas differ by {apart:.3g} in the probe's log-probabilities")
    return logp[0]
