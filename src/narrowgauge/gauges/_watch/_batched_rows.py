"""Many tensors as rows of one matrix, and samples of the rows of long tensors.

A model has hundreds of parameters, most of them small, and a kernel launch costs as much as a million elements. So
tensors are laid one after the other, each padded with zeros to whole rows. An operation on the matrix measures all
of them; then rows are summed, and the rows of each tensor.

Of a long tensor one row in sixteen can be measured, different ones each time. Counts are estimates then, and ratios
nearly exact, as they are ratios of large sums. Where moments are stored in blocks a row is a whole number of
blocks, so that their scales can be sampled with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from narrowgauge.kernels._tables import sent

ROW = 1024
STRIDE = 16
LEAST = 4 * STRIDE  # a tensor of fewer rows is measured completely
LONG = LEAST * ROW


def to_device(numbers: Sequence[Any], device: torch.device, dtype: type[np.generic] = np.int64) -> Tensor:
    """Numbers that the host knows as a tensor on a device, without waiting for it; not to be written to."""
    return sent(np.array(numbers, dtype=dtype), device)


def flat(x: Tensor) -> Tensor:
    """A tensor, or the local shard of a distributed one, as a vector in row-major order."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    # Called for hundreds of tensors at a due step, and each operation costs host time: only those that are needed.
    if torch.is_grad_enabled():
        local = local.detach()
    return local if local.dim() == 1 else local.reshape(-1)


def flat_gradient(p: Any, grad: Any) -> Tensor:
    """A parameter's gradient as a step takes it, dense and flat.

    Of a DTensor it is cut as the parameter is, and summed where ranks have a part of the sum each: a collective.
    """
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if hasattr(p, "placements") and grad.placements != p.placements:
        grad = grad.redistribute(p.device_mesh, p.placements)
    return flat(grad)


@dataclass(frozen=True)
class Sample:
    """Which rows of long vectors are measured: one in `stride`, different ones for each index.

    Attributes:
        index: the number of the sample.
        stride: 1 for all rows.
    """

    index: int
    stride: int = STRIDE

    def applies(self, elements: int, row: int = ROW) -> bool:
        """Whether a vector is long enough to be sampled."""
        return self.stride > 1 and elements >= LEAST * row

    def rows_of(self, elements: int) -> tuple[int, int]:
        """The stride between a vector's sampled rows, and the first of them."""
        return (self.stride, self.index % self.stride) if self.applies(elements) else (1, 0)

    def size(self, elements: int) -> int:
        """How many elements the sample of a vector has."""
        if not self.applies(elements):
            return elements
        return len(range(self.index % self.stride, elements // ROW, self.stride)) * ROW

    def of(self, x: Tensor) -> Tensor:
        """The sampled rows of a long vector, as a copy; a short vector itself."""
        if not self.applies(x.numel()):
            return x
        x, rows = x.contiguous(), self.size(x.numel()) // ROW
        first = x.storage_offset() + self.index % self.stride * ROW
        # One operation in place of four slices and views.
        return x.as_strided((rows, ROW), (self.stride * ROW, 1), first).reshape(-1)

    def copy_of(self, x: Tensor) -> Tensor:
        """The sampled rows, as a copy of a short vector too."""
        taken = self.of(x)
        return taken.clone() if taken is x or taken._is_view() else taken


@dataclass(frozen=True)
class BlockSample:
    """One row in sixteen of a parameter, with what its state has for these elements; all of a short parameter.

    Attributes:
        elements: of the parameter.
        block: the least common multiple of rows and this is sampled, so that blocks stay whole.
        index: the number of the sample.
    """

    elements: int
    block: int
    index: int

    @classmethod
    def of_view(cls, view: Any, index: int) -> BlockSample:
        """A sample of a parameter as an optimizer of narrowgauge shows it, of whole blocks of its moments.

        All of a parameter with a moment that is encoded as a whole.
        """
        blocks = [slot.block_size for slot in view.plan.slots if slot.storage.quantized]
        blocks += [view.p.numel() for slot in view.plan.slots if slot.storage.whole]
        return cls(view.p.numel(), max([1, *blocks]), index)

    def of(self, x: Tensor) -> Tensor:
        """The sampled items of a tensor of the parameter, as a copy; of a short parameter the tensor.

        Args:
            x: with an item for each element, each two elements or each block; a scalar is returned as it is.
        """
        row = math.lcm(ROW, self.block)  # an even number, and whole blocks
        n, block = self.elements, self.block
        if not x.dim() or not Sample(self.index).applies(n, row):
            return x
        x = x.reshape(-1) if x.numel() == n else x
        items = {n: row, -(-n // 2): row // 2, -(-n // block): row // block}[len(x)]
        rows = x[: n // row * items].reshape(n // row, items, *x.shape[1:])
        return rows[self.index % STRIDE :: STRIDE].flatten(0, 1)


@dataclass(frozen=True)
class BatchedRows:
    """Vectors as rows of one matrix.

    Attributes:
        lengths: elements of each vector.
        device: of the vectors.
    """

    lengths: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, vectors: Sequence[Tensor]) -> BatchedRows:
        return cls(tuple(vector.numel() for vector in vectors), vectors[0].device)

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each vector."""
        return [-(-length // ROW) for length in self.lengths]

    @cached_property
    def _counts(self) -> Tensor:
        return to_device(self.counts, self.device)

    def rows(self, vectors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The matrix (rows, ROW) of vectors of these lengths, each padded with zeros."""
        zeros = vectors[0].new_zeros(ROW)
        padding: dict[int, Tensor] = {}  # most tensors of a model end at the same few places of a row
        parts = []
        for vector, length in zip(vectors, self.lengths, strict=True):
            parts.append(vector)
            if end := length % ROW:
                parts.append(padding.setdefault(end, zeros[end:]))
        return torch.cat(parts).to(dtype).view(-1, ROW)

    def inside(self) -> Tensor:
        """Which places of the matrix are elements and no padding: bool (rows, ROW)."""
        row = torch.arange(sum(self.counts), device=self.device)[:, None]
        first = self.spread(self._counts.cumsum(0) - self._counts)
        left = self.spread(to_device(self.lengths, self.device)) - ROW * (row - first)
        return torch.arange(ROW, device=self.device) < left

    def spread(self, values: Tensor) -> Tensor:
        """One number a vector as a column (rows, 1)."""
        return values.repeat_interleave(self._counts, output_size=sum(self.counts))[:, None]

    def columns(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Scalars, those with one number a vector as columns."""
        return {k: self.spread(v) if isinstance(v, Tensor) and v.dim() else v for k, v in scalars.items()}

    def sums(self, columns: Sequence[Tensor]) -> Tensor:
        """Sums by vector: float64 (vectors, columns), of matrices (rows, ROW)."""
        sums = [column.sum(1, dtype=torch.float64) for column in columns]
        return reduced("sum", torch.stack(sums, dim=1), self._counts)

    def largest(self, x: Tensor) -> Tensor:
        """The largest element of each vector, 0 of an empty one: float64 (vectors,)."""
        return reduced("max", x.amax(1, keepdim=True).to(torch.float64), self._counts)[:, 0]


def reduced(how: Literal["sum", "max"], table: Tensor, counts: Tensor) -> Tensor:
    """Rows of a table added, or the largest of them, by runs of `counts` rows; 0 of an empty run."""
    # unsafe: a check that the lengths add up would wait for the device.
    found: Tensor = torch.segment_reduce(table, how, lengths=counts, axis=0, unsafe=True, initial=0)
    return found


def chunks(lengths: Sequence[int], limit: int = 1 << 24) -> list[slice]:
    """Runs of vectors with at most `limit` elements together, or a single longer vector."""
    found, first, total = [], 0, 0
    for number, length in enumerate(lengths):
        if number > first and total + length > limit:
            found.append(slice(first, number))
            first, total = number, 0
        total += length
    return [*found, slice(first, len(lengths))] if lengths else []
