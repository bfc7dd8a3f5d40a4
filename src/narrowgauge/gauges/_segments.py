"""Many tensors measured as one: rows of a single matrix, and sums by tensor.

A model has hundreds of parameters, most of them small, and a kernel launch costs as much as a million elements. So
tensors are laid one after the other, each filled up with zeros to whole rows; what is measured of an element is
measured of all of them at once, rows are summed, and then the rows of each tensor.

Long tensors can be sampled: one row in sixteen, others every time. Counts are estimates then, and ratios nearly
exact, since they are of a sixteenth of a large number. Where moments are kept in blocks a row is a whole number of
blocks, so that its scales can be sampled with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.kernels._tables import sent

ROW = 1024
SHARE = 16
LEAST = 4 * SHARE  # rows from which a tensor is sampled: 4 of them are taken
LONG = LEAST * ROW


def flat(x: Tensor) -> Tensor:
    """A tensor, or the local shard of a distributed one, as a vector in row-major order."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    # Hundreds of tensors pass here at a due step, and each operation keeps the host: only those that are needed.
    if torch.is_grad_enabled():
        local = local.detach()
    return local if local.dim() == 1 else local.reshape(-1)


def is_sampled(elements: int, share: int, row: int = ROW) -> bool:
    """Whether a vector is long enough to be sampled."""
    return share > 1 and elements >= LEAST * row


def kept(elements: int, turn: int, share: int) -> int:
    """How many elements the sample of a vector has."""
    if not is_sampled(elements, share):
        return elements
    return len(range(turn % share, elements // ROW, share)) * ROW


def sample(x: Tensor, turn: int, share: int = SHARE) -> Tensor:
    """One row in `share` of a long vector, another at every turn, as a copy; a short vector as it is."""
    if not is_sampled(x.numel(), share):
        return x
    first, whole = turn % share, x.numel() // ROW
    rows = len(range(first, whole, share))
    if not x.is_contiguous():
        x = x.contiguous()
    # In one operation what slices and views would be four for.
    return x.as_strided((rows, ROW), (share * ROW, 1), x.storage_offset() + first * ROW).reshape(-1)


def kept_sample(x: Tensor, turn: int, share: int = SHARE) -> Tensor:
    """The same as a copy in any case."""
    taken = sample(x, turn, share)
    return taken.clone() if taken is x or taken._is_view() else taken


@dataclass(frozen=True)
class RowSample:
    """One row in sixteen of a parameter, with what its state has for these elements; all of a short parameter.

    Attributes:
        elements: of the parameter.
        block: elements that share a scale.
        turn: which rows.
    """

    elements: int
    block: int
    turn: int

    @property
    def row(self) -> int:
        """Elements of a row: whole blocks, and an even number."""
        return math.lcm(ROW, self.block)

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return not is_sampled(self.elements, SHARE, self.row)

    def of(self, x: Tensor) -> Tensor:
        """The items of a parameter's tensor that belong to the sample, as a copy; of a short one the tensor.

        Args:
            x: with an item for an element, for two elements or for a block; a count is given back.
        """
        if self.whole or not x.dim():
            return x
        n, row, block = self.elements, self.row, self.block
        x = x.reshape(-1) if x.numel() == n else x
        items = {n: row, -(-n // 2): row // 2, -(-n // block): row // block}[len(x)]
        rows = x[: n // row * items].reshape(n // row, items, *x.shape[1:])
        return rows[self.turn % SHARE :: SHARE].flatten(0, 1)


@dataclass(frozen=True)
class Segments:
    """Vectors as rows of one matrix.

    Attributes:
        lengths: elements of each vector.
        device: where they are.
    """

    lengths: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, vectors: Sequence[Tensor]) -> Segments:
        return cls(tuple(vector.numel() for vector in vectors), vectors[0].device)

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each vector."""
        return [-(-length // ROW) for length in self.lengths]

    @cached_property
    def _counts(self) -> Tensor:
        return sent(np.array(self.counts, dtype=np.int64), self.device)

    def rows(self, vectors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The matrix (rows, ROW) of vectors of these lengths, zeros behind each."""
        zeros = vectors[0].new_zeros(ROW)
        behind: dict[int, Tensor] = {}  # most tensors of a model end at the same few places of a row
        parts = []
        for vector, length in zip(vectors, self.lengths, strict=True):
            parts.append(vector)
            if end := length % ROW:
                if end not in behind:
                    behind[end] = zeros[end:]
                parts.append(behind[end])
        return torch.cat(parts).to(dtype).view(-1, ROW)

    def inside(self) -> Tensor:
        """Which places of the matrix are elements: bool (rows, ROW)."""
        lengths = sent(np.array(self.lengths, dtype=np.int64), self.device)
        row = torch.arange(sum(self.counts), device=self.device)[:, None]
        first = self.spread(self._counts.cumsum(0) - self._counts)
        return torch.arange(ROW, device=self.device) < self.spread(lengths) - ROW * (row - first)

    def spread(self, values: Tensor) -> Tensor:
        """A number a vector as a column (rows, 1)."""
        return values.repeat_interleave(self._counts, output_size=sum(self.counts))[:, None]

    def columns(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Scalars of which some are a number a vector, as what elements of the matrix meet."""
        each = {name: value for name, value in scalars.items() if isinstance(value, Tensor) and value.dim()}
        return {**scalars, **{name: self.spread(value) for name, value in each.items()}}

    def sums(self, columns: Sequence[Tensor]) -> Tensor:
        """Sums by vector: float64 (vectors, columns), of matrices (rows, ROW)."""
        return self._reduced("sum", [column.sum(1, dtype=torch.float64) for column in columns])

    def largest(self, x: Tensor) -> Tensor:
        """The largest element of each vector, 0 of one without: float64 (vectors,)."""
        return self._reduced("max", [x.amax(1).to(torch.float64)])[:, 0]

    def _reduced(self, how: str, columns: Sequence[Tensor]) -> Tensor:
        table = torch.stack(list(columns), dim=1)
        # Lengths are known to add up; asking the device would wait for it.
        reduced = torch.segment_reduce(table, how, lengths=self._counts, axis=0, unsafe=True, initial=0)
        assert isinstance(reduced, Tensor)
        return reduced


def chunks(lengths: Sequence[int], limit: int = 1 << 24) -> list[slice]:
    """Runs of vectors with at most so many elements together, or a single vector with more."""
    found, first, total = [], 0, 0
    for number, length in enumerate(lengths):
        if number > first and total + length > limit:
            found.append(slice(first, number))
            first, total = number, 0
        total += length
    return [*found, slice(first, len(lengths))] if lengths else []
