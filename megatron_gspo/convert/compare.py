"""Two checkpoints of either kind, tensor by tensor, and by the logits that they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_gspo.config.schema import Dtype, LayoutConfig
from megatron_gspo.convert.sides import Side
from megatron_gspo.convert.skeleton import built
from megatron_gspo.convert.world import Progress, shares
from megatron_gspo.weights.bind import bind


@dataclass(frozen=True)
class Difference:
    """What tells tensor `name` of one checkpoint from the other's. `absolute` and `relative` are the largest; the
    latter is in units of the first tensor's largest number."""

    name: str
    what: str
    absolute: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        numbers = f", max difference {self.absolute:.3g}, relative {self.relative:.3g}" if self.absolute else ""
        return f"{self.name}: {self.what}{numbers}"


def compare(one: Side, other: Side, *, tolerance: float = 0.0, any_dtype: bool = False) -> list[Difference]:
    """The differences, in the order of `one`, on every rank: the ranks share the tensors. Collective over the world.

    Numbers differ where the relative difference exceeds `tolerance`; dtypes unless `any_dtype`. Memory holds one tensor
    of each, in fp32.
    """
    found = [Difference(name, f"only in {one.directory}") for name in one.specs if name not in other.specs]
    found += [Difference(name, f"only in {other.directory}") for name in other.specs if name not in one.specs]
    both = [name for name in one.specs if name in other.specs]
    sizes = [one.specs[name].size_bytes for name in both]
    own = [name for name, rank in zip(both, shares(sizes), strict=True) if rank == dist.get_rank()]
    progress = Progress("comparing", sum(one.specs[name].size_bytes for name in own))
    mine = []
    for name in own:
        mine += _compare(name, one, other, tolerance, any_dtype)
        progress.add(one.specs[name].size_bytes)
    everyone: list[list[Difference]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    order = {name: place for place, name in enumerate(both)}
    return found + sorted((d for part in everyone for d in part), key=lambda d: order[d.name])


def _compare(name: str, one: Side, other: Side, tolerance: float, any_dtype: bool) -> list[Difference]:
    a, b = one.specs[name], other.specs[name]
    if a.shape != b.shape:
        return [Difference(name, f"shape {list(a.shape)} against {list(b.shape)}")]
    kinds = f"dtype {a.dtype} against {b.dtype}".replace("torch.", "")
    x, y = one.read(name), other.read(name)
    if a.dtype == b.dtype and torch.equal(x, y):
        return []
    absolute = float((x.float() - y.float()).abs().max()) if x.numel() else 0.0
    largest = float(x.float().abs().max()) if x.numel() else 0.0
    relative = absolute / largest if largest else (float("inf") if absolute else 0.0)
    what = [kinds] if a.dtype != b.dtype and not any_dtype else []
    what += ["numbers"] if relative > tolerance else []
    return [Difference(name, " and ".join(what), absolute, relative)] if what else []


def logits(side: Side, num_tokens: int) -> torch.Tensor:
    """[num_tokens, vocab] fp32 of probe tokens (seeded, the same for every model of a vocabulary), by the model in fp32
    on this rank. Memory holds all of the model."""
    from megatron.core.packed_seq_params import PackedSeqParams

    vocab = side.hf_config["vocab_size"]
    tokens = torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
    )
    with built(side.hf_config, LayoutConfig(), Dtype.fp32, numbers=True) as (model, layout), torch.no_grad():
        side.fill(bind(model.chunks, side.hf_config, layout.pgs))
        (chunk,) = model.chunks
        chunk.eval()
        output = chunk(tokens[None], torch.arange(num_tokens)[None], None, packed_seq_params=packed)
    return output[0, :, :vocab].float()
