# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""The squares of gradients, from sums of programs to sums of tensors: always in the same order, in float64."""

from __future__ import annotations

import triton
import triton.language as tl

_PAGE = tl.constexpr(2048)


@triton.jit
def add_squares(table, flags, partials, squares, WIDTH: tl.constexpr, FIRST: tl.constexpr, PASSES: tl.constexpr):
    """`squares[i]`: the sum of tensor i's programs; 0 for one that is flagged, whose sum is no number perhaps."""
    tensor = tl.program_id(0)
    row = table + tensor * WIDTH
    first, count = tl.load(row + FIRST), tl.load(row + PASSES)
    place = tl.arange(0, _PAGE)
    total = tl.zeros([_PAGE], tl.float64)
    done = count * 0
    while done < count:
        total += tl.load(partials + first + done + place, mask=done + place < count, other=0.0)
        done += _PAGE
    tl.store(squares + tensor, tl.where(tl.load(flags + tensor) > 0, 0.0, tl.sum(total, 0)))
