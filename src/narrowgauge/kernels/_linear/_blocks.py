# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Scales of blocks of 128: one read of the matrix, and codes in one order or in both, each with scales of its own.

A program has a tile of 128 x 128, which holds whole blocks along rows and along columns, or one scale: every absmax
is that of numbers which the program has already. So X is read once for the output, which takes blocks of its rows,
and for the gradient of the weight, which takes blocks of its columns, transposed; and so is G. Sums of columns are
those of a tile, written once and added up afterwards.

Scales lie as multiplies read them, beside codes whose summed side is contiguous: those of 128 numbers of each row
lie one after the other (⌈K / 128⌉, rows), those of tiles along the summed side (⌈rows / 128⌉, ⌈K / 128⌉), in rows
of 16 bytes.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._linear._encode import LARGEST, absmax_of, encode, magnitude, scales, tile_maximum
from narrowgauge.kernels._linear._sizes import over, words
from narrowgauge.kernels._linear._tiles import MOST, SIDE, add_up, fetch_tile, place, put_tile
from narrowgauge.kernels._step._floats import float_of

_WARPS = 8


@triton.jit
def _vector_scales(largest, FORMAT: tl.constexpr, LARGEST: tl.constexpr, SIDE: tl.constexpr):
    """What elements of each row or column are multiplied by, and what a code of 1 stands for."""
    # The same numbers, a few of them a thread: without it each thread divides for all that its elements need.
    found = float_of(absmax_of(tl.gather(largest, tl.arange(0, SIDE), 0), FORMAT))
    return scales(found, found, FORMAT, LARGEST)


@triton.jit
def _quantize_blocks(
    x, codes, scale, transposed, turned_scale, sums, rows, columns,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, SIDE: tl.constexpr, EVEN: tl.constexpr, LONG: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, STRAIGHT_TILE: tl.constexpr, TURNED_TILE: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """One tile a program. Straight codes by ROW or STRAIGHT_TILE, transposed ones by COLUMN or TURNED_TILE."""
    row, column = place(SIDE, LONG)
    down, across = row + tl.arange(0, SIDE), column + tl.arange(0, SIDE)
    values = fetch_tile(x, row, column, rows, columns, SIDE, EVEN)
    if ROW:
        inverse, unit = _vector_scales(tl.max(magnitude(values, FORMAT), 1), FORMAT, LARGEST, SIDE)
        tl.store(scale + (column // SIDE).to(tl.int64) * rows + down, unit, mask=down < rows)
        coded = encode(values, inverse[:, None], FORMAT, LARGEST, False)
        put_tile(codes, coded, row, column, rows, columns, SIDE, EVEN, False)
    if STRAIGHT_TILE or TURNED_TILE:
        found = float_of(absmax_of(tile_maximum(magnitude(values, FORMAT)), FORMAT))
        inverse, unit = scales(found, found, FORMAT, LARGEST)
        if STRAIGHT_TILE:
            tl.store(scale + (row // SIDE) * (tl.cdiv(columns, 4 * SIDE) * 4) + column // SIDE, unit)
            coded = encode(values, inverse, FORMAT, LARGEST, False)
            put_tile(codes, coded, row, column, rows, columns, SIDE, EVEN, False)
        if TURNED_TILE:
            tl.store(turned_scale + (column // SIDE) * (tl.cdiv(rows, 4 * SIDE) * 4) + row // SIDE, unit)
            values = _again(x, row, column, rows, columns, SIDE, EVEN)
            coded = encode(values, inverse, FORMAT, LARGEST, False)
            put_tile(transposed, tl.trans(coded), column, row, columns, rows, SIDE, EVEN, LONG)
    if COLUMN:
        if ROW:
            values = _again(x, row, column, rows, columns, SIDE, EVEN)
        inverse, unit = _vector_scales(tl.max(magnitude(values, FORMAT), 0), FORMAT, LARGEST, SIDE)
        tl.store(turned_scale + (row // SIDE).to(tl.int64) * columns + across, unit, mask=across < columns)
    if SUMS:
        total = tl.sum(values, 0)
        tl.store(sums + (row // SIDE).to(tl.int64) * columns + across, total, mask=across < columns)
    if COLUMN:
        values = _again(x, row, column, rows, columns, SIDE, EVEN)
        coded = encode(values, inverse[None, :], FORMAT, LARGEST, False)
        put_tile(transposed, tl.trans(coded), column, row, columns, rows, SIDE, EVEN, LONG)


@triton.jit
def _again(x, row, column, rows, columns, SIDE: tl.constexpr, EVEN: tl.constexpr):
    """The tile once more, from the cache. What is held for both orders takes twice the registers, and numbers that
    are encoded and nothing else are turned as they were loaded, 16 bits at a time.
    """
    tl.debug_barrier()  # or the compiler keeps the first read
    return fetch_tile(x, row, column, rows, columns, SIDE, EVEN)


_BLOCKS = CachedKernel(_quantize_blocks)


def quantize_blocks(
    x: Tensor, format: str, straight: str, transposed: str, codes: Tensor, scale: Tensor, turned: Tensor,
    turned_scale: Tensor, sums: bool, dtype: torch.dtype = torch.float32,
) -> Tensor | None:  # fmt: skip
    """Quantize a contiguous matrix with scales of blocks.

    Args:
        x: contiguous (rows, columns), neither of them 0.
        format: ``"int8"``, ``"e4m3"`` or ``"e5m2"``.
        straight: ``"row128"`` or ``"tile128"``, or ``""`` where no codes are wanted in x's order.
        transposed: ``"column128"`` or ``"tile128"``, or ``""``.
        codes: contiguous, of x's shape, int8 or (for float8) float8 or uint8; written if `straight` is given.
        scale: of these codes, float32, of the shape that `linear.quantize` gives it, lying as the module says.
        turned, turned_scale: the same of the transposed codes, (columns, rows).
        sums: whether to sum the columns.
        dtype: what their sums are rounded to.

    Returns:
        The column sums (columns,), added in float32.
    """
    rows, columns = x.shape
    partial = x.new_empty((over(rows, SIDE), columns), dtype=torch.float32) if sums else None
    tensors = (
        x, words(codes) if straight else None, scale if straight else None,
        words(turned) if transposed else None, turned_scale if transposed else None, partial,
    )  # fmt: skip
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    _launch(rows, columns, x.dtype, format, straight, transposed, sums)(x.get_device(), addresses, lambda: tensors)
    return None if partial is None else add_up(partial, dtype)


@functools.lru_cache(maxsize=4096)
def _launch(
    rows: int, columns: int, dtype: torch.dtype, format: str, straight: str, transposed: str, sums: bool
) -> BoundLaunch:
    """The launch for matrices of a shape and dtype."""
    grid = over(columns, SIDE), over(rows, SIDE)
    constants = {
        "FORMAT": format, "LARGEST": LARGEST[format], "SIDE": SIDE, "EVEN": rows % SIDE == columns % SIDE == 0,
        "LONG": grid[1] > MOST, "ROW": straight == "row128", "COLUMN": transposed == "column128",
        "STRAIGHT_TILE": straight == "tile128", "TURNED_TILE": transposed == "tile128", "SUMS": sums,
    }  # fmt: skip
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    return BoundLaunch(_BLOCKS, grid[::-1] if constants["LONG"] else grid, (rows, columns), constants, options)
