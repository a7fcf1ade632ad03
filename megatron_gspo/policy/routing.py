"""How many tokens have other experts under the new policy than under the old one.

The GSPO paper (arXiv 2507.18071, section 5.3) names this change as what unsettles token-level ratios of mixtures of
experts: about 10 % of the activated experts differ after one gradient update, in a policy of 48 layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.policy.layout import Layout


class _Pass(Enum):
    old = "the old policy routes"
    new = "the new policy routes"


class RoutingWatch:
    """Watches every router of one rank's chunks, but for those of multi-token-prediction layers; a change counts where
    the token's label trains, padding never.

    A trained token is the place that predicts it: the place whose log-probability is in the ratio. With sequence
    parallelism a router sees this rank's part of the places, so that all ranks together see each place of each layer
    once. Between `old()` and `take()` it holds ceil(experts / 8) bytes per token and layer of the rank.
    """

    def __init__(self, chunks: Sequence[nn.Module], layout: Layout):
        self._layout = layout
        self._pass: _Pass | None = None
        self._micro_batch: MicroBatch | None = None  # whose forward pass is running
        self._old: dict[MicroBatch, dict[TopKRouter, Tensor]] = {}
        self._changed: dict[MicroBatch, Tensor] = {}  # per place here: some layer of this rank has changed
        self._slots: list[Tensor] = []  # [2] int64: slots whose expert changed, slots
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter) and not module.is_mtp_layer:
                    module.register_forward_hook(self._see)

    @contextmanager
    def old(self) -> Iterator[None]:
        """Remember the experts that forward passes choose from now on: those of the old policy."""
        self._pass = _Pass.old
        try:
            yield
        finally:
            self._pass = None

    @contextmanager
    def new(self) -> Iterator[None]:
        """Compare the experts that forward passes choose from now on with the remembered ones of their micro-batch.

        A micro-batch of which nothing is remembered does not count: a step resumed half-way has lost its old policy.
        """
        self._pass = _Pass.new
        try:
            yield
        finally:
            self._pass = None

    @contextmanager
    def forward(self, micro_batch: MicroBatch) -> Iterator[None]:
        """The forward pass of `micro_batch` through one chunk. Recomputation, in the backward pass, stands outside."""
        if self._pass is _Pass.old:
            self._old.setdefault(micro_batch, {})  # also on a pipeline stage without experts
        elif self._pass is _Pass.new and micro_batch in self._old:
            self._changed.setdefault(micro_batch, torch.zeros_like(self._used(micro_batch), dtype=torch.uint8))
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._micro_batch = None

    def take(self, control: dist.ProcessGroup) -> dict[str, float]:
        """Shares over all comparisons since the last call, then forget everything; nothing where none was made.

        routing_changed_tokens: of trained tokens, those with another set of experts in at least one layer.
        routing_changed: of token x layer x expert choices of the old policy, those that the new one did not make.
        Collective over all ranks: a maximum over the pipeline, then a sum over `control`, a group of all ranks on CPU.
        """
        changed, slots = self._changed, self._slots
        used = [self._used(micro_batch) for micro_batch in changed]
        self._old, self._changed, self._slots = {}, {}, []
        if not changed:
            return {}
        tokens = torch.cat(list(changed.values()))
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self._layout.pgs.pp)  # any layer of any stage
        counts = torch.zeros(4, dtype=torch.float64)
        if slots:
            counts[:2] = torch.stack(slots).sum(0).cpu()
        if self._layout.is_last_stage:
            counts[2], counts[3] = tokens.sum(), torch.cat(used).sum()
        dist.all_reduce(counts, group=control)
        changed_slots, num_slots, changed_tokens, num_tokens = counts.tolist()
        return {
            "policy/routing_changed_tokens": changed_tokens / max(num_tokens, 1.0),
            "policy/routing_changed": changed_slots / max(num_slots, 1.0),
        }

    def _see(self, router: nn.Module, _: tuple, output: tuple[Tensor, Tensor]) -> None:
        """Forward hook of a router, whose second output is [t, experts] bool: the chosen ones."""
        micro_batch = self._micro_batch
        if micro_batch is None or self._pass is None:
            return
        assert isinstance(router, TopKRouter)
        chosen = output[1].detach()
        if self._pass is _Pass.old:
            self._old[micro_batch][router] = pack_bits(chosen)
        elif micro_batch in self._old:
            before = unpack_bits(self._old[micro_batch][router], chosen.shape[1])
            used = self._used(micro_batch)[:, None]
            self._slots.append(torch.stack([(before & ~chosen & used).sum(), (before & used).sum()]))
            self._changed[micro_batch] |= ((before ^ chosen) & used).any(dim=1)

    def _used(self, micro_batch: MicroBatch) -> Tensor:
        """[t / tp] bool: which of the places that a router of this rank sees count."""
        return micro_batch.loss_mask.chunk(self._layout.tp)[self._layout.tp_rank]


def pack_bits(flags: Tensor) -> Tensor:
    """[t, ceil(n / 8)] uint8 from flags [t, n] bool, eight flags a byte, the first in the lowest bit."""
    padded = nn.functional.pad(flags, (0, -flags.shape[1] % 8)).view(len(flags), -1, 8)
    return (padded.to(torch.uint8) << _BITS.to(flags.device)).sum(dim=2, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """[t, n] bool: the inverse of `pack_bits`."""
    return (packed[:, :, None] >> _BITS.to(packed.device) & 1).flatten(1)[:, :n].bool()


_BITS = torch.arange(8, dtype=torch.uint8)
