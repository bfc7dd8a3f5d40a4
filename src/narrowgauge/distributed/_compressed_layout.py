"""Where the gradients of a bucket stand in a matrix with one row for each rank.

Each parameter is cut into shards of equal length, in whole blocks, and rank r sums the r-th shard of every
parameter. The bucket's matrix has one row a rank: the shards of its parameters, side by side.

Why not cut the bucket instead? DistributedDataParallel rebuilds its buckets after the first step, in the order in
which gradients arrived, and a resumed run begins with the first ones again. With shards of parameters everything
that follows (blocks, scales, random bits, who sums what, whose residual an error belongs to) depends on the
parameter and not on the bucket in which it travels.

The price is padding: up to a block a rank after each parameter, and none where a parameter has a multiple of
ranks x block_size elements, as matrices usually do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BucketEntry:
    """A parameter in a bucket.

    Attributes:
        key: its name among the hook's parameters.
        begin, end: its elements in the bucket's flat buffer.
        column: where its shards begin in a row of the matrix.
        width: elements of a shard, a multiple of the block size; 0 if it is exempt.
    """

    key: str
    begin: int
    end: int
    column: int = 0
    width: int = 0

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def columns(self, rows: Tensor) -> Tensor:
        """Its part (rows, width) of a matrix."""
        return rows[:, self.column : self.column + self.width]

    def views(self, rows: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views with the same elements, of a matrix (ranks, ...) and of a flat tensor (numel,)."""
        own = self.columns(rows)
        full, rest = divmod(self.numel, self.width)
        if full:
            yield own[:full], flat[: full * self.width].view(full, self.width)
        if rest:
            yield own[full, :rest], flat[full * self.width :]


class ScratchDict(dict[Any, Any]):
    """A cache that is empty in copies and pickles of its owner."""

    def __reduce__(self) -> tuple[type[ScratchDict], tuple[()]]:
        return ScratchDict, ()


@dataclass(frozen=True)
class Layout:
    """The parameters of a bucket.

    Attributes:
        compressed: those in the matrix, in the bucket's order.
        exempt: the others.
        ranks: rows of the matrix.
        width: columns of the matrix.
        scratch: what kernels reuse from one reduction to the next.
    """

    compressed: tuple[BucketEntry, ...]
    exempt: tuple[BucketEntry, ...]
    ranks: int
    width: int
    scratch: ScratchDict = field(default_factory=ScratchDict, compare=False, repr=False)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where exempt elements begin and end in the buffer; neighboring parameters share a span."""
        found: list[tuple[int, int]] = []
        for entry in self.exempt:
            begin = found.pop()[0] if found and found[-1][1] == entry.begin else entry.begin
            found.append((begin, entry.end))
        return found

    @classmethod
    def of(
        cls, keys: Sequence[str], sizes: Sequence[int], exempt: Sequence[bool], ranks: int, block_size: int
    ) -> Layout:
        """The layout of a bucket's parameters, given in its order by names, numbers of elements, and exemption."""
        compressed, others = [], []
        at = column = 0
        for key, numel, is_exempt in zip(keys, sizes, exempt, strict=True):
            if is_exempt:
                others.append(BucketEntry(key, at, at + numel))
            else:
                width = -(-numel // (ranks * block_size)) * block_size
                compressed.append(BucketEntry(key, at, at + numel, column, width))
                column += width
            at += numel
        return cls(tuple(compressed), tuple(others), ranks, column)
