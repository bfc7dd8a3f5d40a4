# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Codes times codes, the scales undone, the bias added, rounded once:

    Y = round(scale_left · scale_right * (left rightᵀ) + bias)

Both operands are (rows, K) with K contiguous: what the tensor cores of Hopper take in eight bits. Sums of int8 are
exact in 32-bit integers. Sums of float8 run in the tensor cores' own accumulators, which keep some 14 bits of what
is added (`fast`), or are added in float32 after every tile along K (`full`).

Two kernels do the same. `_by_pointers` has a tile of the result a program; two or more programs share a
multiprocessor, so that one stores while another multiplies. `_by_descriptors` has a program a multiprocessor that
stays: its tiles are loaded by the copy engine, the next one's while this one is stored.

Tiles are walked in groups of a few rows of tiles, column by column, so that what neighbors read is still in the
cache. Loads past the last row read the last ones again instead of being masked: what they give is not stored.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._codec import KINDS
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel, Describer
from narrowgauge.kernels._linear._configs import MatmulConfig
from narrowgauge.kernels._linear._sizes import over, words
from narrowgauge.kernels._step._floats import INTERPRETED, narrow, rounded_product, words_at


@triton.jit
def _place(tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of tiles of a number: groups of GROUP rows of tiles, column by column."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tile // (GROUP * across)
    first = group * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = tile % (GROUP * across)
    return first + inside % height, inside // height


@triton.jit
def _dot(left, right, total, IMPRECISE: tl.constexpr):
    if total.dtype == tl.int32:
        return tl.dot(left, right, total, out_dtype=tl.int32)
    else:
        return tl.dot(left, right, total, max_num_imprecise_acc=IMPRECISE)


@triton.jit
def _finish(
    total, down, across, rows, columns, left_scale, right_scale, bias,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scales undone and bias added, in float32, in the order of the specification."""
    if LEFT:
        if TALL:
            one = tl.load(left_scale + down)[:, None]
        else:
            one = tl.load(left_scale + down, mask=down < rows, other=0.0)[:, None]
    else:
        one = tl.load(left_scale)
    if RIGHT:
        if WIDE:
            other = tl.load(right_scale + across)[None, :]
        else:
            other = tl.load(right_scale + across, mask=across < columns, other=0.0)[None, :]
    else:
        other = tl.load(right_scale)
    # A product that no compiler joins with the sum.
    result = rounded_product(total.to(tl.float32), one * other)
    return _with_bias(result, across, columns, bias, BIAS, WIDE)


@triton.jit
def _with_bias(result, across, columns, bias, BIAS: tl.constexpr, WIDE: tl.constexpr):
    if BIAS:
        if WIDE:
            added = tl.load(bias + across)
        else:
            added = tl.load(bias + across, mask=across < columns, other=0.0)
        result += added.to(tl.float32)[None, :]
    return result


@triton.jit
def _block_scale(scale, first, count, k, step, along, SHARE: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Scales of SIZE rows of an operand in the k-th block along K: a vector, or the one of their tile."""
    if SHARE > 1:
        return tl.load(scale + (tl.minimum(first, count - 1) // SHARE * step + k * along))
    else:
        # What differs between threads is added last, so that it is added once for all k.
        each = tl.arange(0, SIZE)
        at = scale + (first * step + k * along) + each * step
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=first + each < count, other=0.0)


@triton.jit
def _block(a, b, INTEGER: tl.constexpr):
    """A block's product of codes, in float32."""
    if INTEGER:
        return tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    else:
        return tl.dot(a, b)


@triton.jit
def _add_block(total, product, one, other, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """A block's product, its scales undone, added to those before."""
    if LEFT == 1:
        one = one[:, None]
    if RIGHT == 1:
        other = other[None, :]
    return tl.fma(product, tl.broadcast_to(one * other, product.shape), total)


@triton.jit
def _by_pointers(
    left, right, result, left_scale, right_scale, bias, rows, columns, inner,
    left_step, left_along, right_step, right_along,
    KIND: tl.constexpr, INTEGER: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    IMPRECISE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    tile_row, tile_column = _place(tl.program_id(0), rows, columns, ROWS, COLUMNS, GROUP)
    down = tile_row * ROWS + tl.arange(0, ROWS)
    across = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    along = tl.arange(0, INNER)
    from_row, from_column = down, across
    if not TALL:
        from_row = tl.minimum(down, rows - 1)
    if not WIDE:
        from_column = tl.minimum(across, columns - 1)
    left_at = left + from_row.to(tl.int64)[:, None] * inner + along[None, :]
    right_at = right + from_column.to(tl.int64)[None, :] * inner + along[:, None]
    if INTEGER and not BLOCKS:
        total = tl.zeros([ROWS, COLUMNS], tl.int32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(tl.cdiv(inner, INNER)):
        if DEEP:
            a, b = tl.load(left_at), tl.load(right_at)
        else:
            here = along < inner - k * INNER
            # Codes of float8 are bits here: all zero is the number zero.
            a = tl.load(left_at, mask=here[None, :], other=0.0)
            b = tl.load(right_at, mask=here[:, None], other=0.0)
        if BLOCKS:
            one = _block_scale(left_scale, tile_row * ROWS, rows, k, left_step, left_along, LEFT, ROWS, TALL)
            other = _block_scale(
                right_scale, tile_column * COLUMNS, columns, k, right_step, right_along, RIGHT, COLUMNS, WIDE
            )
            total = _add_block(total, _block(a, b, INTEGER), one, other, LEFT, RIGHT)
        else:
            total = _dot(a, b, total, IMPRECISE)
        left_at += INNER
        right_at += INNER
    if BLOCKS:
        values = _with_bias(total, across, columns, bias, BIAS, WIDE)
    else:
        values = _finish(total, down, across, rows, columns, left_scale, right_scale, bias,
                         LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
    at = result + down.to(tl.int64)[:, None] * columns + across[None, :]
    if TALL and WIDE:
        tl.store(at, words_at(at, narrow(values, KIND)))
    else:
        tl.store(at, words_at(at, narrow(values, KIND)), mask=(down < rows)[:, None] & (across < columns)[None, :])


@triton.jit
def _by_descriptors(
    left, right, result, left_scale, right_scale, bias, rows, columns, inner,
    KIND: tl.constexpr, INTEGER: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, IMPRECISE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_row, tile_column = _place(tile, rows, columns, ROWS, COLUMNS, GROUP)
        if INTEGER:
            total = tl.zeros([ROWS, COLUMNS], tl.int32)
        else:
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(tl.cdiv(inner, INNER)):
            a = left.load([tile_row * ROWS, k * INNER])
            b = right.load([tile_column * COLUMNS, k * INNER])
            total = _dot(a, b.T, total, IMPRECISE)
        down = tile_row * ROWS + tl.arange(0, ROWS)
        if HALVES:
            # What is stored waits in shared memory: by halves it leaves room for one more tile of operands.
            HALF: tl.constexpr = COLUMNS // 2
            parts = tl.reshape(total, [ROWS, 2, HALF])
            one, other = tl.split(tl.permute(parts, [0, 2, 1]))
            across = tile_column * COLUMNS + tl.arange(0, HALF)
            values = _finish(one, down, across, rows, columns, left_scale, right_scale, bias,
                             LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
            result.store(
                [tile_row * ROWS, tile_column * COLUMNS], narrow(values, KIND).to(result.dtype, bitcast=True)
            )
            values = _finish(other, down, across + HALF, rows, columns, left_scale, right_scale, bias,
                             LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
            result.store(
                [tile_row * ROWS, tile_column * COLUMNS + HALF], narrow(values, KIND).to(result.dtype, bitcast=True)
            )
        else:
            across = tile_column * COLUMNS + tl.arange(0, COLUMNS)
            values = _finish(total, down, across, rows, columns, left_scale, right_scale, bias,
                             LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
            result.store(
                [tile_row * ROWS, tile_column * COLUMNS], narrow(values, KIND).to(result.dtype, bitcast=True)
            )


@triton.jit
def _blocks_by_descriptors(
    left, right, result, left_scale, right_scale, bias, rows, columns, inner,
    left_step, left_along, right_step, right_along,
    KIND: tl.constexpr, INTEGER: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, HALVES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """With scales of blocks. By halves the columns of a tile are multiplied one part after the other: a product
    waits in registers beside the sums of all.
    """
    PART: tl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_row, tile_column = _place(tile, rows, columns, ROWS, COLUMNS, GROUP)
        row, column = tile_row * ROWS, tile_column * COLUMNS
        total = tl.zeros([ROWS, PART], tl.float32)
        if HALVES:
            more = tl.zeros([ROWS, PART], tl.float32)
        for k in range(tl.cdiv(inner, INNER)):
            a = left.load([row, k * INNER])
            one = _block_scale(left_scale, row, rows, k, left_step, left_along, LEFT, ROWS, TALL)
            product = _block(a, right.load([column, k * INNER]).T, INTEGER)
            # Scales of columns are many, and are loaded when the product is there: registers are few.
            other = _block_scale(right_scale, column, columns, k, right_step, right_along, RIGHT, PART, WIDE)
            total = _add_block(total, product, one, other, LEFT, RIGHT)
            if HALVES:
                product = _block(a, right.load([column + PART, k * INNER]).T, INTEGER)
                if RIGHT == 1:
                    other = _block_scale(
                        right_scale, column + PART, columns, k, right_step, right_along, RIGHT, PART, WIDE
                    )
                more = _add_block(more, product, one, other, LEFT, RIGHT)
        across = column + tl.arange(0, PART)
        values = narrow(_with_bias(total, across, columns, bias, BIAS, WIDE), KIND)
        result.store([row, column], values.to(result.dtype, bitcast=True))
        if HALVES:
            values = narrow(_with_bias(more, across + PART, columns, bias, BIAS, WIDE), KIND)
            result.store([row, column + PART], values.to(result.dtype, bitcast=True))


_POINTERS, _DESCRIPTORS, _BLOCKS = map(CachedKernel, (_by_pointers, _by_descriptors, _blocks_by_descriptors))


def fits_descriptors(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Whether the copy engine takes these operands: rows of 16 bytes, addresses too."""
    aligned = (left.data_ptr() | right.data_ptr()) % 16 == 0
    return aligned and fits_sides(left.shape[1], right.shape[0], dtype)


def fits_sides(inner: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether rows of operands (..., inner) and of a result (..., columns) have multiples of 16 bytes."""
    return inner % 16 == 0 and columns * dtype.itemsize % 16 == 0


class Multiply:
    """A kernel's launch for operands of one shape, in one dtype, with scales of one kind.

    Args:
        launch: with which sizes, constants and options.
        shape, dtype: of the result.
        blocks: what the copy engine moves at once of the left and right operand and the result; None where the
            kernel goes by pointers.
    """

    def __init__(
        self, launch: BoundLaunch, shape: tuple[int, int], dtype: torch.dtype,
        blocks: tuple[list[int], list[int], list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.shape, self.dtype, self.blocks = launch, shape, dtype, blocks

    def __call__(
        self, left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The product of operands, scales and bias as `_autotune.multiply_codes` takes them."""
        result = left.new_empty(self.shape, dtype=self.dtype)
        scales = left_scale.data_ptr(), right_scale.data_ptr(), 0 if bias is None else bias.data_ptr()
        if self.blocks is None:
            self.launch(
                left.get_device(), (left.data_ptr(), right.data_ptr(), result.data_ptr(), *scales),
                lambda: (left, right, words(result), left_scale, right_scale, bias),
            )  # fmt: skip
            return result
        matrices = left, right, words(result)
        if not self.launch.describers:
            self.launch.describers = tuple(map(Describer, matrices, self.blocks))
        describers = self.launch.describers

        def arguments() -> tuple[Any, ...]:
            described = (describe(matrix) for describe, matrix in zip(describers, matrices, strict=True))
            return *described, left_scale, right_scale, bias

        self.launch(left.get_device(), scales, arguments, matrices)
        return result


# How scales of blocks lie: how many rows of an operand share one, and the steps from one to the next along the rows
# and along K.
Steps = tuple[int, int, int]


@functools.lru_cache(maxsize=4096)
def prepared(
    rows: int, columns: int, inner: int, left: torch.dtype, right: torch.dtype, one: bool | Steps,
    other: bool | Steps, bias: torch.dtype | None, dtype: torch.dtype, full: bool, config: MatmulConfig,
    device: torch.device,
) -> Multiply:  # fmt: skip
    """A multiply by one of the kernels, for operands of these dtypes that are M, K and N, K.

    `one` and `other` say whether there are several scales of the left, of the right operand, or how those of blocks
    lie, of both; a bias is its dtype.
    """
    blocks = isinstance(one, tuple) and isinstance(other, tuple)
    # Where there is one row or column its scale is a vector.
    sides: Any = (one[0], other[0]) if blocks else (one or rows == 1, other or columns == 1)  # type: ignore[index]
    constants = {
        "KIND": KINDS[dtype], "INTEGER": left == torch.int8, "LEFT": sides[0], "RIGHT": sides[1],
        "BIAS": bias is not None, "BLOCKS": blocks, "ROWS": config.rows, "COLUMNS": config.columns,
        "INNER": config.inner, "GROUP": config.group, "IMPRECISE": config.inner if full else None,
        "TALL": rows % config.rows == 0, "WIDE": columns % config.columns == 0,
    }  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    sizes, tiles = (rows, columns, inner), over(rows, config.rows) * over(columns, config.columns)
    steps = (*one[1:], *other[1:]) if blocks else (0,) * 4  # type: ignore[index]
    if config.kernel == "pointers":
        constants["DEEP"] = inner % config.inner == 0
        launch = BoundLaunch(_POINTERS, (tiles,), (*sizes, *steps), constants, options)
        return Multiply(launch, (rows, columns), dtype)
    programs = min(tiles, config.resident * _multiprocessors(device))
    constants |= {"HALVES": config.halves, "PROGRAMS": programs}
    part = config.columns // (2 if config.halves else 1)
    describes = [config.rows, config.inner], [part if blocks else config.columns, config.inner], [config.rows, part]
    del constants["BLOCKS"]
    if blocks:
        del constants["IMPRECISE"]
        options["maxnreg"] = config.registers
    launch = BoundLaunch(
        _BLOCKS if blocks else _DESCRIPTORS, (programs,), (*sizes, *steps) if blocks else sizes, constants, options
    )
    return Multiply(launch, (rows, columns), dtype, describes)


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED:
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
