"""The promise of this package: HF weights on any layout give HF's logits, and come out again bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megatron_gspo.batch.shard import zigzag_positions
from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import buckets, gather, plan_export
from megatron_gspo.weights.load import checkpoint_shapes, load_hf
from tests.ranks import run_ranks
from tests.weights.models import built, write_checkpoint

# Relative to the largest logit. fp32 matmuls over 32 to 64 terms in another order differ by some 1e-7; four layers and
# RMS norms amplify that about tenfold (1.4e-6 at most was seen). A wrong row, head or expert shows at 1e-1.
TOLERANCE = 1e-5
DOCUMENTS = ((12, 20), (24, 8))  # lengths of the packed documents of each micro-batch, in tokens


def token_ids(vocab_size: int) -> list[torch.Tensor]:
    """One [sum of lengths] micro-batch each."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (sum(lengths),), generator=generator) for lengths in DOCUMENTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, PreTrainedModel]]:
    root = tmp_path_factory.mktemp("hf")
    specs: dict[str, dict[str, Any]] = {
        "dense": dict(moe=False, tie_word_embeddings=False),
        "dense_tied": dict(moe=False, tie_word_embeddings=True, vocab_size=130),
        "moe": dict(moe=True, tie_word_embeddings=False),
        "moe_tied": dict(moe=True, tie_word_embeddings=True),
        "moe_mixed": dict(moe=True, mlp_only_layers=[1], num_hidden_layers=5, norm_topk_prob=False),
        "moe_sharded": dict(
            moe=True, tie_word_embeddings=False, decoder_sparse_step=2, save={"max_shard_size": "40KB"}
        ),
        "moe_stacked": dict(moe=True, tie_word_embeddings=False, save={"save_original_format": False}),
    }
    written = {name: (root / name, write_checkpoint(root / name, **spec)) for name, spec in specs.items()}
    assert len(list((root / "moe_sharded").glob("*.safetensors"))) > 1
    return written


@torch.no_grad()
def hf_logits(model: PreTrainedModel) -> list[torch.Tensor]:
    """[tokens, vocab] fp32 of each micro-batch, one document at a time through transformers."""
    return [
        torch.cat([model(input_ids=document[None]).logits[0] for document in tokens.split(lengths)])
        for lengths, tokens in zip(DOCUMENTS, token_ids(model.config.vocab_size), strict=True)
    ]


@dataclass(frozen=True)
class Case:
    checkpoint: str
    layout: LayoutConfig

    def __str__(self) -> str:
        sizes = {k: v for k, v in vars(self.layout).items() if v not in (1, None)}
        return f"{self.checkpoint} {sizes}"


def case(checkpoint: str, **layout: Any) -> Case:
    return Case(checkpoint, LayoutConfig(**layout))


def on_rank(cases: Sequence[Case], checkpoints: dict[str, Path]) -> list[tuple[list[np.ndarray], dict[str, bool]]]:
    """Of each case: this rank's full logits ([] off the last stage) and, of the tensors that it sends, whether each
    equals the file's."""
    results = []
    for case in cases:
        directory = checkpoints[case.checkpoint]
        with built(directory, case.layout) as (model, layout):
            binding = bind(model.chunks, model.hf_config, layout.pgs)
            load_hf(directory, binding)
            logits = [
                logits.numpy() for logits in full_logits(model, layout)
            ]  # torch pickles handles that end with the rank
            plan = plan_export(binding)
            assert checkpoint_shapes(directory, binding) == {tensor.name: tensor.shape for tensor in plan.tensors}
            results.append((logits, sent_equal(directory, plan)))
    return results


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
    """The checkpoint's tensors, transformers 5's stacked experts under their unfused names."""
    tensors = {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensors.pop(name)):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            tensors |= {f"{prefix}.{expert}.{part}.weight": value for part, value in parts.items()}
    return tensors


WORLDS = {
    1: [case(name) for name in ("dense", "dense_tied", "moe", "moe_tied", "moe_mixed", "moe_sharded", "moe_stacked")],
    2: [
        case("dense", tp=2),
        case("dense_tied", tp=2),
        case("dense_tied", pp=2),
        case("moe", tp=2),
        case("moe", pp=2),
        case("moe", pp=2, vpp=2),
        case("moe_tied", pp=2, vpp=2),
        case("moe_mixed", pp=2, pipeline_layout="Ett|tttL"),
        case("moe", ep=2),
        case("moe_stacked", ep=2),
        case("moe", etp=2),
        case("moe_stacked", etp=2),
        case("moe", cp=2),
        case("dense", cp=2),
    ],
    4: [
        case("dense_tied", tp=4),  # 130 rows padded to 132, and more ranks than key/value heads
        case("moe", ep=2, etp=2),
        case("moe_sharded", tp=2, cp=2, ep=4),
        case("moe_mixed", pp=2, vpp=2, tp=2, ep=2, pipeline_layout="Et|t|tt|tL"),
    ],
    8: [
        case("moe", tp=2, ep=2, pp=2),
        case("moe_tied", tp=2, ep=2, pp=2, etp=2),
        case("moe_tied", tp=2, cp=2, pp=2, ep=4),
    ],
}


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout_gives_hf_logits_and_the_same_tensors_back(size: int, models):
    by_rank = run_ranks(size, on_rank, WORLDS[size], {name: directory for name, (directory, _) in models.items()})
    for number, one in enumerate(WORLDS[size]):
        directory, model = models[one.checkpoint]
        results = [rank[number] for rank in by_rank]
        scored = [logits for logits, _ in results if logits]
        assert len(scored) == size // one.layout.pp, one
        for logits in scored:
            for ours, theirs in zip(logits, hf_logits(model), strict=True):
                error = (torch.from_numpy(ours) - theirs).abs().max() / theirs.abs().max()
                assert error < TOLERANCE, f"{one}: relative error {error:.2e}"
        sent = [item for _, tensors in results for item in tensors.items()]
        assert sorted(name for name, _ in sent) == sorted(file_tensors(directory)), one
        assert all(equal for _, equal in sent), f"{one}: {[name for name, equal in sent if not equal]}"
