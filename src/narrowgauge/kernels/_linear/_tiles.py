# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""A scale for the tensor or a scale a column: a pass for the absmax, and one that writes codes in either order.

The first pass leaves one absmax a program, some hundreds. The quantizing programs read them all and take the
largest, which saves a launch. Maxima are the same in any order.

Codes are wanted in the order of the matrix, or transposed, or both: the second pass turns tiles around on the chip
and writes what is asked for, from one read.

Sums of columns come from the partial sums that a quantizing pass leaves, rounded once to the dtype that is wanted
(`add_up`). Torch takes two operations for it, a sum and a conversion, and each keeps the host for longer than this
takes. Rows are added in an order that depends on nothing but how many there are.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._codec import KINDS
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._linear._encode import LARGEST, absmax_of, encode, magnitude, scales, tile_maximum
from narrowgauge.kernels._linear._sizes import over, power_above, words
from narrowgauge.kernels._step._floats import float_of, narrow, words_at

# Programs that look for the absmax, two for each multiprocessor of an H200, and the tile that they move down
# the rows with.
_LOOKING, _DOWN, _ACROSS = 264, 8, 512
# Tiles that are on their way to a program at once, in shared memory.
_STAGES = 4
# The tile that is quantized, and warps for it.
SIDE, _WARPS = 128, 8
# How many programs the second side of a grid takes.
MOST = 65535
# Partial sums are some hundreds of rows of some thousand columns. Few columns a program make many programs; 16 are
# 64 bytes, two of the sectors that memory is read by.
_SUMMED_DOWN, _SUMMED_ACROSS, _SUMMING_WARPS = 256, 16, 8


@triton.jit
def _look(
    x, tensor, column, sums, rows, columns, tiles,
    FORMAT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    TENSOR: tl.constexpr, COLUMN: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial maxima, as bits: one number a program, or a row a row of programs; and partial sums of columns."""
    across = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    down = tl.arange(0, HEIGHT)[:, None]
    first = tl.program_id(1) * tiles
    end = tl.minimum(first + tiles, tl.cdiv(rows, HEIGHT))
    largest = tl.zeros([HEIGHT, WIDTH], tl.int32)
    if SUMS:
        total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in tl.range(first, end, num_stages=STAGES):
        row = tile * HEIGHT
        pointers = x + row.to(tl.int64) * columns + (down * columns + across[None, :])
        if TALL and WIDE:
            values = tl.load(pointers).to(tl.float32)
        else:
            here = (row + down < rows) & (across < columns)[None, :]
            values = tl.load(pointers, mask=here, other=0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(values, FORMAT))
        if SUMS:
            total += values
    if TENSOR:
        tl.store(
            tensor + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
            absmax_of(tile_maximum(largest), FORMAT),
        )
    if COLUMN:
        found = absmax_of(tl.max(largest, 0), FORMAT)
        tl.store(column + tl.program_id(1) * columns + across, found, mask=across < columns)
    if SUMS:
        tl.store(sums + tl.program_id(1) * columns + across, tl.sum(total, 0), mask=across < columns)


@triton.jit
def place(SIDE: tl.constexpr, LONG: tl.constexpr):
    """The first row and column of a program's tile."""
    # Neighbors share rows. The second side of the grid takes 65535: where there are more rows of tiles, 8 million
    # rows, they go along the first side, which takes 2^31.
    return tl.program_id(0 if LONG else 1) * SIDE, tl.program_id(1 if LONG else 0) * SIDE


@triton.jit
def fetch_tile(x, row, column, rows, columns, SIDE: tl.constexpr, EVEN: tl.constexpr):
    """A tile in float32; zeros where the matrix ends. EVEN says that it does not end within tiles."""
    inside = (tl.arange(0, SIDE)[:, None] * columns) + tl.arange(0, SIDE)[None, :]
    start = row.to(tl.int64) * columns + column
    if EVEN:
        return tl.load(x + start + inside).to(tl.float32)
    else:
        here = (row + tl.arange(0, SIDE) < rows)[:, None] & (column + tl.arange(0, SIDE) < columns)[None, :]
        return tl.load(x + start + inside, mask=here, other=0).to(tl.float32)


@triton.jit
def put_tile(codes, coded, row, column, rows, columns, SIDE: tl.constexpr, EVEN: tl.constexpr, LONG: tl.constexpr):
    """Write a tile of codes at a row and column of a matrix; LONG if it may reach over more than 2^31 elements."""
    down = tl.arange(0, SIDE)[:, None]
    if LONG:
        down = down.to(tl.int64)
    at = codes + row.to(tl.int64) * columns + column + (down * columns + tl.arange(0, SIDE)[None, :])
    if EVEN:
        tl.store(at, words_at(codes, coded))
    else:
        here = (row + tl.arange(0, SIDE) < rows)[:, None] & (column + tl.arange(0, SIDE) < columns)[None, :]
        tl.store(at, words_at(codes, coded), mask=here)


@triton.jit
def _quantize_tiles(
    x, maxima, average, codes, transposed, scale, own, rows, columns, count,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, LONG: tl.constexpr, TENSOR: tl.constexpr, AVERAGE: tl.constexpr, STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """One tile a program. `maxima` are bits: `count` of the tensor, or one a column."""
    row, column = place(SIDE, LONG)
    across = column + tl.arange(0, SIDE)
    if TENSOR:
        each = tl.arange(0, COUNT)
        found = float_of(tl.max(tl.load(maxima + each, mask=each < count, other=0), 0))
        absmax = found
        if AVERAGE:
            known = tl.load(average).to(tl.float32)
            absmax = tl.where(known > 0.0, known, found)
        inverse, unit = scales(found, absmax, FORMAT, LARGEST)
        if (row == 0) & (column == 0):
            tl.store(scale, unit)
            tl.store(own, found)
    else:
        found = float_of(tl.load(maxima + across, mask=across < columns, other=0))
        inverse, unit = scales(found, found, FORMAT, LARGEST)
        if row == 0:
            tl.store(scale + across, unit, mask=across < columns)
        inverse = inverse[None, :]
    values = fetch_tile(x, row, column, rows, columns, SIDE, TALL and WIDE)
    coded = encode(values, inverse, FORMAT, LARGEST, AVERAGE)
    if STRAIGHT:
        put_tile(codes, coded, row, column, rows, columns, SIDE, TALL and WIDE, False)
    if TURNED:
        put_tile(transposed, tl.trans(coded), column, row, columns, rows, SIDE, TALL and WIDE, LONG)


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
    tl.store(total + across, words_at(total, narrow(tl.sum(sums, 0), KIND)), mask=across < columns)


_LOOK, _TILES, _ADD_UP = map(CachedKernel, (_look, _quantize_tiles, _add_up))


def add_up(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of the columns of a matrix, added in float32 and rounded once.

    Args:
        partial: contiguous float32 (rows, columns), fewer than 2^31 elements.
        dtype: of the result (columns,): bfloat16, float16 or float32.
    """
    rows, columns = partial.shape
    total = partial.new_empty((columns,), dtype=dtype)
    addresses = partial.data_ptr(), total.data_ptr()
    _launch_sums(rows, columns, dtype)(partial.get_device(), addresses, lambda: (partial, words(total)))
    return total


@functools.lru_cache(maxsize=4096)
def _launch_sums(rows: int, columns: int, dtype: torch.dtype) -> BoundLaunch:
    width = min(_SUMMED_ACROSS, power_above(columns))
    constants = {"HEIGHT": min(_SUMMED_DOWN, power_above(rows)), "WIDTH": width, "KIND": KINDS[dtype]}
    return BoundLaunch(_ADD_UP, (over(columns, width),), (rows, columns), constants, {"num_warps": _SUMMING_WARPS})


def _looked(
    x: Tensor, format: str, column: bool, sums: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Bits of partial maxima, (programs,) or (1, columns), and the sums of the columns."""
    rows, columns = x.shape
    launch, shape, high = _launch_look(rows, columns, x.dtype, format, column, sums)
    maxima = x.new_empty(shape, dtype=torch.int32)
    # What the kernel writes, as its arguments come: maxima of the tensor or of columns, and sums.
    at, found = ((0, maxima.data_ptr()), (None, maxima)) if column else ((maxima.data_ptr(), 0), (maxima, None))
    total = None
    if not sums:
        launch(x.get_device(), (x.data_ptr(), *at, 0), lambda: (x, *found, None))
    else:
        partial = x.new_empty((high, columns), dtype=torch.float32)
        launch(x.get_device(), (x.data_ptr(), *at, partial.data_ptr()), lambda: (x, *found, partial))
        total = add_up(partial, dtype)
    return maxima.amax(0, keepdim=True) if column else maxima, total


@functools.lru_cache(maxsize=4096)
def _launch_look(
    rows: int, columns: int, dtype: torch.dtype, format: str, column: bool, sums: bool
) -> tuple[BoundLaunch, tuple[int, ...], int]:
    """The launch for matrices of a shape and dtype, the shape of the maxima, how many rows of sums it leaves."""
    width = min(_ACROSS, power_above(columns))
    height = min(_DOWN * _ACROSS // width, power_above(rows))
    wide, tall = over(columns, width), over(rows, height)
    tiles = over(tall, max(1, min(tall, _LOOKING // wide)))
    high = over(tall, tiles)
    constants = {
        "FORMAT": format, "HEIGHT": height, "WIDTH": width, "TALL": rows % height == 0,
        "WIDE": columns % width == 0, "TENSOR": not column, "COLUMN": column, "SUMS": sums, "STAGES": _STAGES,
    }  # fmt: skip
    launch = BoundLaunch(_LOOK, (wide, high), (rows, columns, tiles), constants, {"num_warps": 4})
    return launch, (high, columns) if column else (high * wide,), high


def sum_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of the columns of a contiguous matrix, added in float32."""
    total = _looked(x, "int8", False, True, dtype)[1]
    assert total is not None
    return total


def _quantized(
    x: Tensor, format: str, maxima: Tensor, average: Tensor | None, codes: Tensor | None, transposed: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    count = maxima.numel() if maxima.dim() == 1 else 0
    scale = x.new_empty((1, 1 if count else columns), dtype=torch.float32)
    own = x.new_empty((1, 1), dtype=torch.float32)
    launch = _launch_tiles(
        rows, columns, x.dtype, format, count, None if average is None else average.dtype,
        codes is not None, transposed is not None,
    )  # fmt: skip
    addresses = (
        x.data_ptr(), maxima.data_ptr(), 0 if average is None else average.data_ptr(),
        0 if codes is None else codes.data_ptr(), 0 if transposed is None else transposed.data_ptr(),
        scale.data_ptr(), own.data_ptr(),
    )  # fmt: skip
    launch(
        x.get_device(), addresses, lambda: (x, maxima, average, words(codes), words(transposed), scale, own)
    )  # fmt: skip
    return scale, own


@functools.lru_cache(maxsize=4096)
def _launch_tiles(
    rows: int, columns: int, dtype: torch.dtype, format: str, count: int, average: torch.dtype | None,
    straight: bool, turned: bool,
) -> BoundLaunch:  # fmt: skip
    """The launch for matrices of a shape and dtype, with `count` maxima of the tensor or, if 0, one a column."""
    constants = {
        "FORMAT": format, "LARGEST": LARGEST[format], "SIDE": SIDE, "COUNT": power_above(max(count, 1)),
        "TALL": rows % SIDE == 0, "WIDE": columns % SIDE == 0, "LONG": over(rows, SIDE) > MOST,
        "TENSOR": count > 0, "AVERAGE": average is not None, "STRAIGHT": straight, "TURNED": turned,
    }  # fmt: skip
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    grid = over(columns, SIDE), over(rows, SIDE)
    if constants["LONG"]:
        grid = grid[1], grid[0]
    return BoundLaunch(_TILES, grid, (rows, columns, max(count, 1)), constants, options)


def quantize_tensor(
    x: Tensor, format: str, average: Tensor | None, codes: Tensor | None, transposed: Tensor | None,
    sums: bool, dtype: torch.dtype = torch.float32, maxima: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Quantize a contiguous matrix with one scale.

    Args:
        x: contiguous (rows, columns), neither of them 0.
        format: ``"int8"``, ``"e4m3"`` or ``"e5m2"``.
        average: an absmax to use in place of x's own where it is above 0, one number.
        codes: contiguous, of x's shape, int8 or (for float8) float8 or uint8; is written if it is there.
        transposed: the same, (columns, rows).
        sums: whether to sum the columns.
        dtype: what their sums are rounded to.
        maxima: int32 (some hundred at most,), bits of the absmax of each part of x, if known.

    Returns:
        The scale (1, 1) and x's own absmax (1, 1), float32, and the column sums (columns,), added in float32.
    """
    total = None
    if maxima is None:
        maxima, total = _looked(x, format, False, sums, dtype)
    elif sums:
        total = sum_columns(x, dtype)
    return *_quantized(x, format, maxima, average, codes, transposed), total


def quantize_columns(
    x: Tensor, format: str, transposed: Tensor, sums: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Quantize a contiguous matrix with a scale a column, into its transpose.

    The arguments are those of `quantize_tensor`.

    Returns:
        Scales (1, columns), float32, and the column sums (columns,), added in float32.
    """
    maxima, total = _looked(x, format, True, sums, dtype)
    return _quantized(x, format, maxima, None, None, transposed)[0], total
