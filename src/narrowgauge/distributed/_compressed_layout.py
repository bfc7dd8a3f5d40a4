"""Where the gradients of a bucket stand in a matrix with a row a rank.

Each parameter is cut into shards by itself, all as long as each other and in whole blocks, and rank r sums the
r-th shard of every parameter. The matrix of a bucket has one row a rank: the shards of its parameters, side by
side.

Why not cut the bucket instead? DistributedDataParallel builds its buckets anew after the first step, in the
order in which gradients came, and a training that resumes begins with the first ones again. A shard that is a
parameter's own makes all that follows (blocks, scales, random bits, who sums what, whose memory an error goes
to) a function of the parameter and not of the bucket it happens to travel in.

The price is padding: up to a block a rank behind each parameter, nothing where a parameter has a multiple of
ranks x block_size elements, as matrices usually do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A parameter in a bucket.

    Attributes:
        key: its name among the hook's parameters.
        begin, end: its elements in the bucket's flat buffer.
        column: of the matrix, where its shards begin.
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
        """Pairs of views, of a matrix (ranks, ...) and of a flat tensor (numel,), that hold the same."""
        own = self.columns(rows)
        full, rest = divmod(self.numel, self.width)
        if full:
            yield own[:full], flat[: full * self.width].view(full, self.width)
        if rest:
            yield own[full, :rest], flat[full * self.width :]


class Told(dict[Any, Any]):
    """What has been made ready on the way. A copy of its owner begins with none of it."""

    def __reduce__(self) -> tuple[type[Told], tuple[()]]:
        return Told, ()


@dataclass(frozen=True)
class Layout:
    """The parameters of a bucket.

    Attributes:
        compressed: those in the matrix, in the bucket's order.
        exempt: the others.
        ranks: rows of the matrix.
        width: columns of the matrix.
        told: what passes keep of it, from one reduction to the next.
    """

    compressed: tuple[Piece, ...]
    exempt: tuple[Piece, ...]
    ranks: int
    width: int
    told: Told = field(default_factory=Told, compare=False, repr=False)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where exempt elements begin and end in the buffer: one span of parameters that are neighbours."""
        found: list[tuple[int, int]] = []
        for piece in self.exempt:
            begin = found.pop()[0] if found and found[-1][1] == piece.begin else piece.begin
            found.append((begin, piece.end))
        return found

    @classmethod
    def of(
        cls, keys: Sequence[str], sizes: Sequence[int], exempt: Sequence[bool], ranks: int, block_size: int
    ) -> Layout:
        """The layout of a bucket's parameters in its order: names, numbers of elements, what is exempt."""
        compressed, others = [], []
        at = column = 0
        for key, numel, out in zip(keys, sizes, exempt, strict=True):
            if out:
                others.append(Piece(key, at, at + numel))
            else:
                width = -(-numel // (ranks * block_size)) * block_size
                compressed.append(Piece(key, at, at + numel, column, width))
                column += width
            at += numel
        return cls(tuple(compressed), tuple(others), ranks, column)
