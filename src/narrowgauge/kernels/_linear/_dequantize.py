# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""What codes and scales stand for, in one pass: a byte read and a word written for each element.

The arithmetic is `ScaledCodes.dequantize`'s, bit for bit: the float32 product, rounded once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._codec import KINDS
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._linear._sizes import over, power_above, words
from narrowgauge.kernels._step._floats import narrow, words_at

_HEIGHT, _WIDTH, _WARPS = 8, 512, 4
_BLOCK = 128


@triton.jit
def _dequantize(
    codes, scale, result, rows, columns, step, along,
    KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile a program; scales a row, a column, or one for all. With BLOCK a tile is as wide as a block of a row,
    whose scales are `step` apart from row to row and `along` from block to block.
    """
    # Rows of tiles go along the first side of the grid, which takes 2^31.
    row = tl.program_id(0) * HEIGHT
    down = row + tl.arange(0, HEIGHT)
    across = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = row.to(tl.int64) * columns + tl.program_id(1) * WIDTH
    inside = tl.arange(0, HEIGHT)[:, None] * columns + tl.arange(0, WIDTH)[None, :]
    here = (down < rows)[:, None] & (across < columns)[None, :]
    if TALL and WIDE:
        values = tl.load(codes + at + inside).to(tl.float32)
    else:
        # Codes of float8 are numbers here, and so is what stands for those past the end.
        values = tl.load(codes + at + inside, mask=here, other=0.0).to(tl.float32)
    if BLOCK:
        at_scale = scale + down.to(tl.int64) * step + tl.program_id(1).to(tl.int64) * along
        factor = tl.load(at_scale, mask=down < rows, other=0.0)[:, None]
    elif ROW:
        factor = tl.load(scale + down, mask=down < rows, other=0.0)[:, None]
    elif COLUMN:
        factor = tl.load(scale + across, mask=across < columns, other=0.0)[None, :]
    else:
        factor = tl.load(scale)
    words = words_at(result, narrow(values * factor, KIND))
    if TALL and WIDE:
        tl.store(result + at + inside, words)
    else:
        tl.store(result + at + inside, words, mask=here)


_DEQUANTIZE = CachedKernel(_dequantize)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes stand for.

    Args:
        codes: contiguous (rows, columns), neither of them 0; int8, float8 e4m3 or e5m2.
        scale: float32 (rows, 1), (1, columns), (1, 1) or, in any order in memory, (rows, ⌈columns / 128⌉).
        dtype: of the result, of the codes' shape: bfloat16, float16 or float32.
    """
    rows, columns = codes.shape
    block = scale.shape[1] not in (1, columns)
    step, along = scale.stride() if block else (0, 0)
    row, column = (not block and count > 1 for count in scale.shape)
    scale = scale if block else scale.contiguous()
    launch = _launch(rows, columns, step, along, codes.dtype, dtype, row, column, block)
    result = codes.new_empty((rows, columns), dtype=dtype)
    addresses = codes.data_ptr(), scale.data_ptr(), result.data_ptr()
    launch(codes.get_device(), addresses, lambda: (codes, scale, words(result)))
    return result


@functools.lru_cache(maxsize=4096)
def _launch(
    rows: int, columns: int, step: int, along: int, codes: torch.dtype, dtype: torch.dtype, row: bool, column: bool,
    block: bool,
) -> BoundLaunch:  # fmt: skip
    """The launch for codes of a shape and dtype, with a scale a row, a column, a block of a row, or one."""
    width = _BLOCK if block else min(_WIDTH, max(16, power_above(columns)))
    height = _HEIGHT * _WIDTH // width
    constants = {
        "KIND": KINDS[dtype], "HEIGHT": height, "WIDTH": width, "TALL": rows % height == 0,
        "WIDE": columns % width == 0, "ROW": row, "COLUMN": column, "BLOCK": block,
    }  # fmt: skip
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    grid = over(rows, height), over(columns, width)
    return BoundLaunch(_DEQUANTIZE, grid, (rows, columns, step, along), constants, options)
