# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""A scale a row: one read of the matrix, one write of its codes, and the sums of its columns if they are wanted.

A row stays in registers between its absmax and its codes. Tiles have sides that are powers of two and rows of
1280 or 5120 elements do not, so a row is held in two pieces: the largest power of two that it has, and the
smallest that takes the rest.

Column sums are kept in float32 by each program for the rows it has, in their order, and written once; the few
rows of these partial sums are added afterwards. Nothing depends on which program is first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._linear._encode import LARGEST, absmax_of, encode, magnitude, scales
from narrowgauge.kernels._linear._sizes import over, power_above, words
from narrowgauge.kernels._linear._tiles import add_up, sum_columns
from narrowgauge.kernels._step._floats import float_of, words_at

# Warps of programs that sum columns, which stay: two times eight for each multiprocessor of an H200. Their
# partial sums are written and read once.
_SUMMING = 132 * 16
# Tiles that are on their way to such a program at once, in shared memory.
_STAGES = 5
# Longer rows are not held in registers.
_LONGEST = 1 << 14
# Elements of a tile, and how many of them a thread has; with sums, which take registers too, half of that.
_TILE, _EACH = 4096, 32


@triton.jit
def _fetch(x, row, rows, columns, FROM: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
           TALL: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """A tile; zeros where the matrix ends. TALL and WIDE say whether tiles end with it."""
    across = FROM + tl.arange(0, WIDTH)[None, :]
    down = tl.arange(0, HEIGHT)[:, None]
    pointers = x + row.to(tl.int64) * columns + (down * columns + across)
    if TALL and WIDE:
        return tl.load(pointers)
    elif TALL:
        return tl.load(pointers, mask=across < columns, other=0)
    else:
        return tl.load(pointers, mask=(row + down < rows) & (across < columns), other=0)


@triton.jit
def _put(codes, values, row, rows, columns, FROM: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
         TALL: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    across = FROM + tl.arange(0, WIDTH)[None, :]
    down = tl.arange(0, HEIGHT)[:, None]
    pointers = codes + row.to(tl.int64) * columns + (down * columns + across)
    if TALL and WIDE:
        tl.store(pointers, words_at(pointers, values))
    elif TALL:
        tl.store(pointers, words_at(pointers, values), mask=across < columns)
    else:
        tl.store(pointers, words_at(pointers, values), mask=(row + down < rows) & (across < columns))


@triton.jit
def _put_sums(sums, total, columns, FROM: tl.constexpr, WIDTH: tl.constexpr):
    across = FROM + tl.arange(0, WIDTH)
    tl.store(sums + tl.program_id(0) * columns + across, tl.sum(total, 0), mask=across < columns)


@triton.jit
def _code(
    a, b, codes, scale, row, rows, columns,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, HEIGHT: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a tile of whole rows in two pieces, the second of which is `a` again if there is none."""
    own = tl.max(magnitude(a, FORMAT), 1)
    if SECOND > 0:
        own = tl.maximum(own, tl.max(magnitude(b, FORMAT), 1))
    absmax = float_of(absmax_of(own, FORMAT))
    inverse, unit = scales(absmax, absmax, FORMAT, LARGEST)
    _put(codes, encode(a, inverse[:, None], FORMAT, LARGEST, False), row, rows, columns,
         0, HEIGHT, FIRST, TALL, WIDE or SECOND > 0)  # fmt: skip
    if SECOND > 0:
        _put(codes, encode(b, inverse[:, None], FORMAT, LARGEST, False), row, rows, columns,
             FIRST, HEIGHT, SECOND, TALL, WIDE)  # fmt: skip
    down = row + tl.arange(0, HEIGHT)
    if TALL:
        tl.store(scale + down, unit)
    else:
        tl.store(scale + down, unit, mask=down < rows)


@triton.jit
def _quantize_rows(
    x, codes, scale, sums, rows, columns, tiles,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, HEIGHT: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p has one tile of HEIGHT rows, or with sums `tiles` of them, one after the other."""
    WHOLE: tl.constexpr = WIDE or SECOND > 0  # the first piece never passes the row's end if there is a second
    if not SUMS:
        row = tl.program_id(0) * HEIGHT
        a = _fetch(x, row, rows, columns, 0, HEIGHT, FIRST, TALL, WHOLE).to(tl.float32)
        b = a
        if SECOND > 0:
            b = _fetch(x, row, rows, columns, FIRST, HEIGHT, SECOND, TALL, WIDE).to(tl.float32)
        _code(a, b, codes, scale, row, rows, columns, FORMAT, LARGEST, HEIGHT, FIRST, SECOND, TALL, WIDE)
    else:
        first = tl.program_id(0) * tiles
        end = tl.minimum(first + tiles, tl.cdiv(rows, HEIGHT))
        total = tl.zeros([HEIGHT, FIRST], tl.float32)
        if SECOND > 0:
            more = tl.zeros([HEIGHT, SECOND], tl.float32)
        # The next tiles are on their way, to shared memory, while one is worked on.
        for tile in tl.range(first, end, num_stages=STAGES):
            row = tile * HEIGHT
            left = _fetch(x, row, rows, columns, 0, HEIGHT, FIRST, TALL, WHOLE).to(tl.float32)
            right = left
            total += left
            if SECOND > 0:
                right = _fetch(x, row, rows, columns, FIRST, HEIGHT, SECOND, TALL, WIDE).to(tl.float32)
                more += right
            _code(left, right, codes, scale, row, rows, columns,
                  FORMAT, LARGEST, HEIGHT, FIRST, SECOND, TALL, WIDE)  # fmt: skip
        _put_sums(sums, total, columns, 0, FIRST)
        if SECOND > 0:
            _put_sums(sums, more, columns, FIRST, SECOND)


@triton.jit
def _quantize_long_rows(
    x, codes, scale, rows, columns, FORMAT: tl.constexpr, LARGEST: tl.constexpr, WIDTH: tl.constexpr
):
    """A row a program, read twice: what is longer than registers are many comes from the cache again."""
    row = tl.program_id(0)
    largest = tl.zeros([1, WIDTH], tl.int32)
    start = row.to(tl.int64) * columns
    across = tl.arange(0, WIDTH)[None, :]
    at = 0
    while at < columns:
        values = tl.load(x + start + at + across, mask=at + across < columns, other=0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(values, FORMAT))
        at += WIDTH
    absmax = float_of(absmax_of(tl.max(largest, 1), FORMAT))
    inverse, unit = scales(absmax, absmax, FORMAT, LARGEST)
    tl.store(scale + row + tl.arange(0, 1), unit)
    at = 0
    while at < columns:
        here = at + across < columns
        values = tl.load(x + start + at + across, mask=here, other=0).to(tl.float32)
        coded = encode(values, inverse[:, None], FORMAT, LARGEST, False)
        tl.store(codes + start + at + across, words_at(codes, coded), mask=here)
        at += WIDTH


def pieces(columns: int) -> tuple[int, int]:
    """Two powers of two, or one and 0, that together take a row."""
    first = 1 << (columns.bit_length() - 1)
    rest = columns - first
    if not rest:
        return first, 0
    second = max(power_above(rest), min(16, first))
    return (first, second) if second < first else (2 * first, 0)


_ROWS, _LONG_ROWS = CachedKernel(_quantize_rows), CachedKernel(_quantize_long_rows)


def layout(rows: int, columns: int, sums: bool) -> tuple[int, int, int, int]:
    """Rows of a tile, the two pieces of each, and warps."""
    first, second = pieces(columns)
    elements, each = (_TILE // 2, _EACH // 2) if sums else (_TILE, _EACH)
    height = min(power_above(max(1, elements // (first + second))), power_above(rows))
    height = max(height, 4 // first)  # an instruction makes up to four codes
    warps = min(16, 1 << (max(1, height * (first + second) // (32 * each)).bit_length() - 1))
    return height, first, second, warps


def quantize_rows(
    x: Tensor, format: str, codes: Tensor, sums: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Quantize a contiguous matrix with a scale a row.

    Args:
        x: contiguous (rows, columns), neither of them 0.
        format: ``"int8"``, ``"e4m3"`` or ``"e5m2"``.
        codes: contiguous, of x's shape, int8 or (for float8) float8 or uint8; is written.
        sums: whether to sum the columns.
        dtype: what their sums are rounded to.

    Returns:
        Scales (rows, 1), float32, and the column sums (columns,), added in float32.
    """
    rows, columns = x.shape
    launch, programs = _launch(rows, columns, x.dtype, format, sums)
    scale = x.new_empty((rows, 1), dtype=torch.float32)
    addresses = x.data_ptr(), codes.data_ptr(), scale.data_ptr()
    if not programs:
        launch(x.get_device(), addresses, lambda: (x, words(codes), scale))
        return scale, sum_columns(x, dtype) if sums else None
    if not sums:  # the kernel does not look at where they would go
        launch(x.get_device(), (*addresses, 0), lambda: (x, words(codes), scale, None))
        return scale, None
    partial = x.new_empty((programs, columns), dtype=torch.float32)
    launch(x.get_device(), (*addresses, partial.data_ptr()), lambda: (x, words(codes), scale, partial))
    return scale, add_up(partial, dtype)


@functools.lru_cache(maxsize=4096)
def _launch(rows: int, columns: int, dtype: torch.dtype, format: str, sums: bool) -> tuple[BoundLaunch, int]:
    """The launch for matrices of a shape and dtype, and its programs; 0 for rows that are not held in registers."""
    constants: dict[str, Any] = {"FORMAT": format, "LARGEST": LARGEST[format]}
    if columns > _LONGEST:
        constants |= {"WIDTH": _TILE}
        options = {"num_warps": 4, "enable_fp_fusion": False}
        return BoundLaunch(_LONG_ROWS, (rows,), (rows, columns), constants, options), 0
    height, first, second, warps = layout(rows, columns, sums)
    count = over(rows, height)
    tiles = over(count, _SUMMING // warps) if sums else 1
    programs = over(count, tiles)
    constants |= {
        "HEIGHT": height, "FIRST": first, "SECOND": second, "TALL": rows % height == 0,
        "WIDE": columns == first + second, "SUMS": sums, "STAGES": _STAGES,
    }  # fmt: skip
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return BoundLaunch(_ROWS, (programs,), (rows, columns, tiles), constants, options), programs
