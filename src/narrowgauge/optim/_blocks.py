"""Some whole blocks of a parameter, as a shorter parameter of the same plan.

Moments are kept in blocks along the flat parameter, so whole blocks are taken: their elements of the parameter and
the gradient, and what each word of the state has for them, an item for an element, for two, or for a block. The
specification does the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Every so manieth block of a flat parameter; what is behind its last whole block is left out.

    Attributes:
        elements: of the parameter.
        a_scale: elements of a block of its moments.
        share: one block in so many is taken.
        first: the first of them.
    """

    elements: int
    a_scale: int
    share: int
    first: int

    @property
    def each(self) -> int:
        """Elements of what is taken at a time: whole blocks, and an even number."""
        return math.lcm(self.a_scale, 2)

    @property
    def count(self) -> int:
        """How many elements are taken."""
        return len(range(self.first, self.elements // self.each, self.share)) * self.each

    def of(self, x: Tensor) -> Tensor:
        """The items of a parameter's tensor, or of a word of its state, that belong to these; a count as it is."""
        rows = self.rows(x)
        return x if rows is None else rows.flatten(0, 1)

    def rows(self, x: Tensor) -> Tensor | None:
        """The same with a row for what is taken at a time, a view where it can be; None of a count."""
        n, each = self.elements, self.each
        x = x.reshape(-1) if x.numel() == n else x
        items = {n: each, -(-n // 2): each // 2}.get(len(x), each // self.a_scale) if x.dim() else 0
        if not items:
            return None
        blocks = n // each
        if x.dim() == 1 and x.is_contiguous():  # as below, in one operation
            size = len(range(self.first, blocks, self.share)), items
            return x.as_strided(size, (self.share * items, 1), x.storage_offset() + self.first * items)
        parts = x[: blocks * items].reshape(blocks, items, *x.shape[1:])
        return parts[self.first :: self.share]
