"""The vocabulary of a model family: which HF tensors make which Megatron parameter, and how tensor parallelism cuts it.

A rule names one or several HF tensors and the one Megatron parameter that holds them. In HF names `{layer}` and
`{expert}` stand for GLOBAL numbers; in Megatron names they stand where Megatron writes its local ones, which `bind`
translates.

Loading and exporting walk the same `pieces`: rectangles that a rank's shard and an HF tensor share. Dense parameters
are cut over the TP group, expert ones over the ETP group; a rule does not know which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
Region = tuple[slice, ...]  # leading dimensions; the others are whole
FURTHER = "mtp.layers.{layer}."  # how Megatron calls layers that predict further tokens


@dataclass(frozen=True)
class Stacked:
    """Another spelling of a tensor: rows row, row + step, ... of entry `{expert}` of one tensor `shape` [experts, ...],
    of the entry's transpose where it is `transposed`.

    `only`: no checkpoint has the unfused tensor. The stacked one is exported, whole.
    """

    name: str
    shape: Shape
    row: int = 0
    step: int = 1
    transposed: bool = False
    only: bool = False


@dataclass(frozen=True)
class HFTensor:
    """One tensor of the HF checkpoint, by its unfused name and its full shape."""

    name: str
    shape: Shape
    stacked: Stacked | None = None
    duplicates: tuple[str, ...] = ()  # names under which a checkpoint may hold the same numbers once more
    repeats: tuple[str, ...] = ()  # the same, and what such a checkpoint becomes holds them too
    other_names: tuple[str, ...] = ()  # one of these instead of `name` in other formats of the checkpoint

    @property
    def held_again(self) -> tuple[str, ...]:
        """Every other name that stands for the same numbers; a checkpoint may lack them, not differ in them."""
        return self.duplicates + self.repeats

    @property
    def exported(self) -> tuple[str, Shape]:
        """Name and shape of the tensor that leaves with these numbers: its own, or those of the stacked one."""
        if self.stacked is not None and self.stacked.only:
            return self.stacked.name, self.stacked.shape
        return self.name, self.shape


@dataclass(frozen=True)
class Piece:
    """shard[put] and hf[source][take] hold the same numbers."""

    source: int
    take: Region
    put: Region


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """`hf` tensors <-> one Megatron parameter, for every layer in `layers` and every expert below `experts`.

    `megatron` are the spellings of the parameter under different layer specs (Transformer Engine fuses norms into the
    linear that follows); a model has exactly one of them. `copies` are parameters that repeat it on another pipeline
    stage: they are loaded, never exported. `keeps_dtype`: it leaves in its own dtype, whatever that of the export.
    `together`: dense rules of that name leave together, layer by layer, from one sender in one bucket.
    """

    hf: tuple[HFTensor, ...]
    megatron: tuple[str, ...]
    copies: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    experts: int | None = None
    keeps_dtype: bool = False
    together: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether tensor parallelism cuts the parameter; otherwise every rank holds all of it."""
        return True

    @abstractmethod
    def local_shape(self, size: int) -> Shape:
        """Shape of one of `size` shards. Raises ValueError where the parameter cannot be cut that often."""

    @abstractmethod
    def pieces(self, rank: int, size: int, local: Shape) -> Iterator[Piece]:
        """What shard `rank` of `size`, of shape `local`, shares with the HF tensors."""

    def fits(self, local: Shape, size: int) -> bool:
        """Whether a parameter of shape `local` is one of `size` shards."""
        return local == self.local_shape(size)


@dataclass(frozen=True, kw_only=True)
class Copy(Rule):
    """The HF tensor itself, cut along `dim` or (None) held whole by every rank."""

    dim: int | None = None

    @property
    def is_cut(self) -> bool:
        return self.dim is not None

    def local_shape(self, size: int) -> Shape:
        (tensor,) = self.hf
        if self.dim is None:
            return tensor.shape
        return (*tensor.shape[: self.dim], _share(self, tensor.shape[self.dim], size), *tensor.shape[self.dim + 1 :])

    def pieces(self, rank: int, size: int, local: Shape) -> Iterator[Piece]:
        if self.dim is None:
            yield Piece(0, (), ())
            return
        before, share = (slice(None),) * self.dim, local[self.dim]
        yield Piece(0, (*before, slice(rank * share, (rank + 1) * share)), ())


@dataclass(frozen=True, kw_only=True)
class Vocab(Rule):
    """Rows of a vocabulary, which Megatron pads at the end so that they divide by TP. Padding rows are zero on load
    and never leave."""

    def local_shape(self, size: int) -> Shape:
        """The smallest possible shard; padding may make it longer."""
        (tensor,) = self.hf
        return (-(-tensor.shape[0] // size), *tensor.shape[1:])

    def fits(self, local: Shape, size: int) -> bool:
        smallest = self.local_shape(size)
        return local[0] >= smallest[0] and local[1:] == smallest[1:]

    def pieces(self, rank: int, size: int, local: Shape) -> Iterator[Piece]:
        start = rank * local[0]
        stop = min(start + local[0], self.hf[0].shape[0])
        if start < stop:
            yield Piece(0, (slice(start, stop),), (slice(0, stop - start),))


@dataclass(frozen=True, kw_only=True)
class GateUp(Rule):
    """Gated fc1: HF's gate and up, each cut along its rows; a shard is [gate_r; up_r]."""

    def local_shape(self, size: int) -> Shape:
        return (sum(_share(self, t.shape[0], size) for t in self.hf), *self.hf[0].shape[1:])

    def pieces(self, rank: int, size: int, local: Shape) -> Iterator[Piece]:
        put = 0
        for source, tensor in enumerate(self.hf):
            share = tensor.shape[0] // size
            yield Piece(source, (slice(rank * share, (rank + 1) * share),), (slice(put, put + share),))
            put += share


@dataclass(frozen=True, kw_only=True)
class QKV(Rule):
    """HF's q, k, v (weights or biases) interleaved by key/value head, `kv_heads` times [its q heads; k; v], and cut by
    rows.

    With more TP ranks than key/value heads a shard is a part of one head's block (Megatron gathers it in the forward).
    """

    kv_heads: int

    def local_shape(self, size: int) -> Shape:
        if max(size, self.kv_heads) % min(size, self.kv_heads):
            raise ValueError(
                f"{self.megatron[0]}: {self.kv_heads} key/value heads cannot be cut over tensor-parallel size {size}; "
                "one must divide the other"
            )
        return (_share(self, sum(t.shape[0] for t in self.hf), size), *self.hf[0].shape[1:])

    def pieces(self, rank: int, size: int, local: Shape) -> Iterator[Piece]:
        first, last = rank * local[0], (rank + 1) * local[0]
        row = 0
        for head in range(self.kv_heads):
            for source, tensor in enumerate(self.hf):
                rows = tensor.shape[0] // self.kv_heads
                start, stop = max(row, first), min(row + rows, last)
                if start < stop:
                    origin = head * rows - row
                    take = (slice(origin + start, origin + stop),)
                    yield Piece(source, take, (slice(start - first, stop - first),))
                row += rows


def _share(rule: Rule, rows: int, size: int) -> int:
    if rows % size:
        raise ValueError(f"{rule.megatron[0]}: {rows} cannot be cut into {size} equal parts; choose another tp or etp")
    return rows // size
