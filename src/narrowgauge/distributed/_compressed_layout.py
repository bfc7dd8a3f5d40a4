"""Where the gradients of a bucket stand in a matrix with one row for each rank, and the residuals beside them.

Each parameter is cut into shards of equal length, in whole blocks, and rank r sums the r-th shard of every
parameter. The bucket's matrix has one row a rank: the shards of its parameters, side by side.

Why not cut the bucket instead? DistributedDataParallel rebuilds its buckets after the first step, in the order in
which gradients arrived, and a resumed run begins with the first ones again. With shards of parameters everything
that follows (blocks, scales, random bits, who sums what, whose residual an error belongs to) depends on the
parameter and not on the bucket in which it travels.

The price is padding: up to a block a rank after each parameter, and none where a parameter has a multiple of
ranks x block_size elements, as matrices usually do.

A residual is what a rank's messages lost, one number for each compressed element. Only the sum of residuals over
ranks counts (see `_compressed_passes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
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


class ErrorFeedback:
    """Residuals by parameter name, flat in the order in which the gradient lies in a bucket.

    Attributes:
        dtype: of the residuals.
        moves: how often residuals may have changed their addresses.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.moves = 0
        self._residuals: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals.values())

    def get(self, key: str) -> Tensor | None:
        return self._residuals.get(key)

    def of(self, entry: BucketEntry, device: torch.device) -> Tensor:
        """The residual of a parameter, on its device; zeros at first."""
        residual = self._residuals.get(entry.key)
        if residual is None:
            residual = self._residuals[entry.key] = torch.zeros(entry.numel, dtype=self.dtype, device=device)
        if residual.numel() != entry.numel:
            raise ValueError(
                f"state_dict: {entry.key} must have {entry.numel} errors, got {residual.numel()}: it is another "
                "model's"
            )
        if residual.device != device:
            residual = self._residuals[entry.key] = residual.to(device)
            self.moves += 1
        return residual

    def write(self, entry: BucketEntry, lost: Tensor, keep: Tensor) -> None:
        """Store a parameter's part of a matrix (ranks, width), or keep the old residual if `keep`, a 0-d bool."""
        for part, old in entry.views(lost, self.of(entry, lost.device)):
            old.copy_(torch.where(keep, old.to(torch.float32), part))

    def state(self, rank: int) -> dict[str, Tensor]:
        """Copies, by ``rank/parameter``."""
        return {f"{rank}/{key}": residual.detach().clone() for key, residual in self._residuals.items()}

    def load(self, state: Mapping[str, Any], rank: int) -> None:
        """Take this rank's entries of what `state` returned, checked; other ranks' entries are ignored."""
        found: dict[str, Tensor] = {}
        for name, residual in state.items():
            owner, _, key = str(name).partition("/")
            valid = owner.isdecimal() and key and isinstance(residual, Tensor) and residual.is_floating_point()
            if not valid or residual.is_meta or residual.layout is not torch.strided:
                raise ValueError(f"state_dict: 'memory' must hold float tensors by 'rank/parameter', got {name!r}")
            if int(owner) == rank:
                if not torch.isfinite(residual).all():
                    raise ValueError(f"state_dict: {name!r} in 'memory' is not finite: it was damaged")
                found[key] = residual.detach().reshape(-1).to(self.dtype, copy=True)
        if state and not found:
            raise ValueError(
                f"state_dict: 'memory' must have entries of rank {rank}, got none; keep each rank's own, or pass "
                "an empty 'memory' to begin anew"
            )
        self._residuals = found
        self.moves += 1
