"""What every family has to show, on every layout: transformers' logits and gradients, and each tensor back bit for bit.

A family's test file writes tiny random checkpoints by transformers itself (`write`) and names the layouts. Round trips
alone prove nothing, since a wrong transpose survives them; logits and gradients decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_gspo.batch.shard import MicroBatch, shard, zigzag_positions
from megatron_gspo.batch.trajectory import Trajectories
from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.policy.model import ddp_config, wrap
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights.bind import Binding, bind
from megatron_gspo.weights.export import buckets, gather, plan_export
from megatron_gspo.weights.load import checkpoint_shapes, load_hf
from tests.ranks import run_ranks
from tests.weights.models import built, policy_config

# Relative to the largest logit. fp32 matmuls over 32 to 64 terms in another order differ by some 1e-7; four layers and
# RMS norms amplify that about tenfold (1.4e-6 at most was seen). A wrong row, head or expert shows at 1e-1.
LOGITS = 1e-5
# Relative to the largest gradient of the same tensor: sums over all tokens on top of that.
GRADIENTS = 1e-4
# Lengths of the packed documents of each micro-batch, in tokens: four micro-batches, so that dp 4 has one each.
DOCUMENTS = ((12, 20), (24, 8), (32,), (4, 16, 12))
Checkpoints = Mapping[str, tuple[Path, PreTrainedModel]]


def write(directory: Path, model: PreTrainedModel, *, seed: int = 0, **save: Any) -> tuple[Path, PreTrainedModel]:
    """Saves `model` with random numbers in every parameter that starts as a constant: a swapped norm must show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory, **save)
    return directory, model.eval()


def token_ids(vocab_size: int) -> list[torch.Tensor]:
    """One [sum of lengths] micro-batch each."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (sum(lengths),), generator=generator) for lengths in DOCUMENTS]


def documents(vocab_size: int) -> list[torch.Tensor]:
    """All documents of all micro-batches."""
    pairs = zip(DOCUMENTS, token_ids(vocab_size), strict=True)
    return [document for lengths, tokens in pairs for document in tokens.split(lengths)]


@torch.no_grad()
def hf_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """[tokens, vocab] fp32 of each micro-batch, one document at a time through transformers."""
    return [
        torch.cat([model(input_ids=document[None]).logits[0] for document in tokens.split(lengths)])
        for lengths, tokens in zip(DOCUMENTS, token_ids(model.config.vocab_size), strict=True)
    ]


def hf_gradients(model: PreTrainedModel, scratch: Path, **save: Any) -> dict[str, torch.Tensor]:
    """By the names of the checkpoint's tensors: transformers' own gradient of `weighted_loss`, written by its save."""
    model.zero_grad()
    total = torch.zeros(())
    for document in documents(model.config.vocab_size):
        logp = model(input_ids=document[None]).logits[0, :-1].log_softmax(-1)
        chosen = logp.gather(1, document[1:, None])[:, 0]
        total = total + weighted_loss(chosen, torch.arange(len(chosen)))
    total.backward()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros(()))
    model.save_pretrained(scratch, **save)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    model.zero_grad()
    return file_tensors(scratch)


def weighted_loss(logp: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Weights by position, so that a shifted label or a lost token shows."""
    return -(logp * (1.0 + 0.1 * positions)).sum() / sum(map(sum, DOCUMENTS))


@dataclass(frozen=True)
class Case:
    checkpoint: str
    layout: LayoutConfig

    def __str__(self) -> str:
        sizes = {k: v for k, v in vars(self.layout).items() if v not in (1, None)}
        return f"{self.checkpoint} {sizes}"


def case(checkpoint: str, **layout: Any) -> Case:
    return Case(checkpoint, LayoutConfig(**layout))


@dataclass(frozen=True)
class Found:
    """Of one case on one rank: full logits ([] off the last stage); of the tensors that it sends, whether each equals
    the file's; and their gradients."""

    logits: list[np.ndarray]  # arrays: torch would pickle handles that end with the rank
    equal: dict[str, bool]
    gradients: dict[str, np.ndarray]


def on_rank(cases: Sequence[Case], checkpoints: dict[str, Path]) -> list[Found]:
    results = []
    for case in cases:
        directory = checkpoints[case.checkpoint]
        with built(directory, case.layout) as (model, layout):
            binding = bind(model.chunks, model.hf_config, layout.pgs)
            load_hf(directory, binding)
            logits = [logits.numpy() for logits in full_logits(model, layout)]
            plan = plan_export(binding)
            carried = carried_tensors(directory, binding)
            assert {k: v for k, v in checkpoint_shapes(directory, binding).items() if k not in carried} == {
                tensor.name: tensor.shape for tensor in plan.tensors
            }
            equal = sent_equal(directory, plan)
            results.append(Found(logits, equal, gradients(directory, case.layout, model, layout)))
    return results


def carried_tensors(directory: Path, binding: Binding) -> set[str]:
    """Names of the checkpoint's tensors that no model holds."""
    patterns = binding.family.carried(binding.hf_config)
    return {name for name in file_tensors(directory) if any(re.fullmatch(pattern, name) for pattern in patterns)}


def gradients(directory: Path, config: LayoutConfig, model, layout) -> dict[str, np.ndarray]:
    """Gradient of `weighted_loss` after Megatron's reductions, of the tensors that this rank sends, by HF name."""
    policy = policy_config(directory, config)
    policy = replace(policy, optimizer=replace(policy.optimizer, distributed=False))
    chunks = wrap(model, ddp_config(policy), layout)

    def loss(micro_batch: MicroBatch, number: int, logp: torch.Tensor, entropy: torch.Tensor):
        mask = micro_batch.loss_mask
        return weighted_loss(logp[mask], micro_batch.position_ids[0][mask]), {}

    mine = micro_batches(model.vocab_size, layout)
    Stepper(model, chunks, layout, temperature=1.0).forward_backward(mine, loss, sum(map(sum, DOCUMENTS)))
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    plan = plan_export(bind(model.chunks, model.hf_config, layout.pgs))
    return {
        name: tensor.detach().numpy() for bucket in buckets(plan, size_bytes=2**20) for name, tensor in gather(bucket)
    }


def micro_batches(vocab_size: int, layout) -> list[MicroBatch]:
    """This data-parallel rank's part of DOCUMENTS."""
    whole = documents(vocab_size)
    offsets = torch.tensor([0, *map(len, whole)]).cumsum(0)
    total = int(offsets[-1])
    held = Trajectories(
        rows=torch.arange(len(whole)),
        offsets=offsets,
        tokens=torch.cat(whole),
        loss_mask=torch.ones(total, dtype=torch.bool).index_fill_(0, offsets[:-1], False),
        logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int64),
    )
    first = torch.tensor([0, *map(len, DOCUMENTS)]).cumsum(0).tolist()
    rows = [range(first[i], first[i + 1]) for i in range(len(DOCUMENTS))]
    return [
        shard(held, r, padded_length=sum(DOCUMENTS[0]), cp=layout.cp, cp_rank=layout.cp_rank)
        for r in rows[layout.dp_rank :: layout.dp]
    ]


def full_logits(model, layout) -> list[torch.Tensor]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in model.chunks:
        chunk.eval()
    iterators = [iter(zip(DOCUMENTS, token_ids(model.vocab_size), strict=True)) for _ in model.chunks]
    single = len(model.chunks) == 1
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=partial(forward_step, layout),
            data_iterator=iterators[0] if single else iterators,
            model=model.chunks[0] if single else model.chunks,
            num_microbatches=len(DOCUMENTS),
            seq_length=sum(DOCUMENTS[0]),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return (
        [
            whole(output, lengths, layout)[:, : model.vocab_size]
            for output, lengths in zip(outputs, DOCUMENTS, strict=True)
        ]
        if outputs
        else []
    )


def forward_step(layout, batches: Iterator, chunk):
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths, tokens = next(batches)
    positions = torch.cat([zigzag_positions(n, layout.cp, layout.cp_rank) for n in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    own = tokens[packed_places(lengths, layout.cp, layout.cp_rank)]
    output = chunk(own[None], positions[None], None, packed_seq_params=packed)
    return output, lambda output, non_loss_data=False: output


def packed_places(lengths: Sequence[int], cp: int, cp_rank: int) -> torch.Tensor:
    """Where in the packed row each token of a CP rank stands."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([start + zigzag_positions(n, cp, cp_rank) for start, n in zip(starts, lengths, strict=False)])


def whole(output: torch.Tensor, lengths: Sequence[int], layout) -> torch.Tensor:
    """[1, tokens / cp, padded vocab / tp] of this rank -> [tokens, padded vocab]."""
    by_vocab = [torch.empty_like(output) for _ in range(layout.tp)]
    dist.all_gather(by_vocab, output.contiguous(), group=layout.pgs.tp)
    own = torch.cat(by_vocab, -1)[0]
    by_tokens = [torch.empty_like(own) for _ in range(layout.cp)]
    dist.all_gather(by_tokens, own, group=layout.pgs.cp)
    full = torch.empty(sum(lengths), own.shape[-1])
    for cp_rank, part in enumerate(by_tokens):
        full[packed_places(lengths, layout.cp, cp_rank)] = part
    return full


def sent_equal(directory: Path, plan) -> dict[str, bool]:
    """Name -> equal to the checkpoint's tensor, of what this rank sends in small buckets."""
    original = file_tensors(directory)
    sent: dict[str, bool] = {}
    for bucket in buckets(plan, size_bytes=16 * 1024):
        for name, tensor in gather(bucket):
            assert bucket.sender == dist.get_rank() and name not in sent
            sent[name] = torch.equal(tensor, original[name]) and tensor.dtype == original[name].dtype
    return sent


def file_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, transformers 5's stacked experts under their unfused names, MXFP4 decoded by it."""
    tensors = {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        codes, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        if f"{name}_bias" in tensors:
            continue  # gpt-oss has no unfused names
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensors.pop(name)):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            tensors |= {f"{prefix}.{expert}.{part}.weight": value for part, value in parts.items()}
    return tensors


def assert_parity(size: int, cases: Sequence[Case], checkpoints: Checkpoints, scratch: Path) -> None:
    """On `size` ranks: logits, export and gradients of every case."""
    logits = {one.checkpoint: hf_logits(checkpoints[one.checkpoint][1]) for one in cases}
    expected_gradients = {
        one.checkpoint: hf_gradients(checkpoints[one.checkpoint][1], scratch / one.checkpoint) for one in cases
    }
    by_rank = run_ranks(size, on_rank, cases, {name: directory for name, (directory, _) in checkpoints.items()})
    for number, one in enumerate(cases):
        directory, _ = checkpoints[one.checkpoint]
        results = [rank[number] for rank in by_rank]
        _assert_logits(one, [found.logits for found in results if found.logits], size, logits[one.checkpoint])
        equal = [item for found in results for item in found.equal.items()]
        assert all(same for _, same in equal), f"{one}: {[name for name, same in equal if not same]} changed"
        expected = expected_gradients[one.checkpoint]
        sent = {name: gradient for found in results for name, gradient in found.gradients.items()}
        assert sorted(name for name, _ in equal) == sorted(sent), one
        assert set(sent) <= set(file_tensors(directory)), one
        for name, gradient in sent.items():
            theirs = expected[name]
            error = (torch.from_numpy(gradient) - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)
            assert error < GRADIENTS, f"{one}: gradient of {name} is off by {error:.2e} of its largest"


def _assert_logits(one: Case, scored: Sequence[list[np.ndarray]], size: int, expected: Sequence[torch.Tensor]) -> None:
    assert len(scored) == size // one.layout.pp, one
    for logits in scored:
        for ours, theirs in zip(logits, expected, strict=True):
            error = (torch.from_numpy(ours) - theirs).abs().max() / theirs.abs().max()
            assert error < LOGITS, f"{one}: relative error {error:.2e}"
