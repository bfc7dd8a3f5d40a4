# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Sums of columns from the partial sums that quantizers leave, rounded once to the dtype that is wanted.

Torch takes two operations for it, a sum and a conversion, and each keeps the host for longer than this takes.
Rows are added in an order that depends on nothing but how many there are.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._linear._sizes import over, power_above, words
from narrowgauge.kernels._step._floats import narrow

# Partial sums are some hundreds of rows of some thousand columns. Few columns a program make many programs; 16 are
# 64 bytes, two of the sectors that memory is read by.
_DOWN, _ACROSS, _WARPS = 256, 16, 8
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@triton.jit
def _add_up(partial, total, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    across = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    down = tl.arange(0, HEIGHT)
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    row = 0
    while row < rows:
        here = (row + down < rows)[:, None] & (across < columns)[None, :]
        sums += tl.load(partial + (row + down)[:, None] * columns + across[None, :], mask=here, other=0.0)
        row += HEIGHT
    tl.store(total + across, narrow(tl.sum(sums, 0), KIND), mask=across < columns)


_ADD_UP = CachedKernel(_add_up)


def add_up(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of the columns of a matrix.

    Args:
        partial: contiguous float32 (rows, columns), fewer than 2^31 elements.
        dtype: of the result: bfloat16, float16 or float32.

    Returns:
        (columns,), added in float32 and rounded once.
    """
    rows, columns = partial.shape
    total = partial.new_empty((columns,), dtype=dtype)
    addresses = partial.data_ptr(), total.data_ptr()
    _launch(rows, columns, dtype)(partial.get_device(), addresses, lambda: (partial, words(total)))
    return total


@functools.lru_cache(maxsize=4096)
def _launch(rows: int, columns: int, dtype: torch.dtype) -> BoundLaunch:
    width = min(_ACROSS, power_above(columns))
    constants = {"HEIGHT": min(_DOWN, power_above(rows)), "WIDTH": width, "KIND": _KINDS[dtype]}
    return BoundLaunch(_ADD_UP, (over(columns, width),), (rows, columns), constants, {"num_warps": _WARPS})
