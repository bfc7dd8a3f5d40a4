# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Codes times codes, the scales undone, the bias added, rounded once:

    Y = round(scale_left · scale_right * (left rightᵀ) + bias)

Both operands are (rows, K) with K contiguous: what the tensor cores of Hopper take in eight bits. Sums of int8 are
exact in 32-bit integers. Sums of float8 run in the tensor cores' own accumulators, which keep some 14 bits of what
is added (`fast`), or are added in float32 after every tile along K (`full`).

Two kernels do the same. `_by_pointers` has a tile of the result a program; two or more programs share a
multiprocessor, so that one stores while another multiplies. `_by_descriptors` has a program a multiprocessor that
stays: its tiles are loaded by the copy engine, the next one's while this one is stored.

Tiles are walked in groups of a few rows of tiles, column by column, so that what neighbours read is still in the
cache. Loads past the last row read the last ones again instead of being masked: what they give is not stored.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from narrowgauge.kernels._launches import Launches
from narrowgauge.kernels._linear._ways import Way
from narrowgauge.kernels._step._floats import INTERPRETED, narrow

_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


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
    result = total.to(tl.float32) * (one * other)
    if BIAS:
        if WIDE:
            added = tl.load(bias + across)
        else:
            added = tl.load(bias + across, mask=across < columns, other=0.0)
        result += added.to(tl.float32)[None, :]
    return result


@triton.jit
def _by_pointers(
    left, right, result, left_scale, right_scale, bias, rows, columns, inner,
    KIND: tl.constexpr, INTEGER: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, IMPRECISE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
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
    if INTEGER:
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
        total = _dot(a, b, total, IMPRECISE)
        left_at += INNER
        right_at += INNER
    values = _finish(total, down, across, rows, columns, left_scale, right_scale, bias,
                     LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
    at = result + down.to(tl.int64)[:, None] * columns + across[None, :]
    if TALL and WIDE:
        tl.store(at, narrow(values, KIND))
    else:
        tl.store(at, narrow(values, KIND), mask=(down < rows)[:, None] & (across < columns)[None, :])


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
            result.store([tile_row * ROWS, tile_column * COLUMNS], narrow(values, KIND))
            values = _finish(other, down, across + HALF, rows, columns, left_scale, right_scale, bias,
                             LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
            result.store([tile_row * ROWS, tile_column * COLUMNS + HALF], narrow(values, KIND))
        else:
            across = tile_column * COLUMNS + tl.arange(0, COLUMNS)
            values = _finish(total, down, across, rows, columns, left_scale, right_scale, bias,
                             LEFT, RIGHT, BIAS, TALL, WIDE)  # fmt: skip
            result.store([tile_row * ROWS, tile_column * COLUMNS], narrow(values, KIND))


_POINTERS, _DESCRIPTORS = Launches(_by_pointers), Launches(_by_descriptors)


def fits_descriptors(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Whether the copy engine takes these operands: rows of 16 bytes, addresses too."""
    aligned = all(t.data_ptr() % 16 == 0 and t.shape[1] % 16 == 0 for t in (left, right))
    return aligned and right.shape[0] * dtype.itemsize % 16 == 0


def multiply(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, full: bool, way: Way,
) -> Tensor:  # fmt: skip
    """Multiply codes by one of the kernels.

    Args:
        left: contiguous (M, K), K at least 1; int8 with int8, or float8 with float8 of either kind.
        right: contiguous (N, K).
        left_scale: float32, (M, 1) contiguous or one number.
        right_scale: float32, (1, N) contiguous or one number.
        bias: (N,) contiguous or None.
        dtype: of the result: bfloat16, float16 or float32.
        full: whether sums of float8 are added in float32 after every tile along K.
        way: a kernel that fits; not cuBLAS.

    Returns:
        (M, N).
    """
    (rows, inner), columns = left.shape, right.shape[0]
    result = torch.empty((rows, columns), dtype=dtype, device=left.device)
    words = result if dtype == torch.float32 else result.view(torch.int16)
    integer = left.dtype == torch.int8
    constants = {
        "KIND": _KINDS[dtype], "INTEGER": integer, "LEFT": left_scale.numel() > 1 or rows == 1,
        "RIGHT": right_scale.numel() > 1 or columns == 1, "BIAS": bias is not None,
        "ROWS": way.rows, "COLUMNS": way.columns, "INNER": way.inner, "GROUP": way.group,
        "IMPRECISE": way.inner if full else None,
        "TALL": rows % way.rows == 0, "WIDE": columns % way.columns == 0,
    }  # fmt: skip
    options = {"num_warps": way.warps, "num_stages": way.stages, "enable_fp_fusion": False}
    scales = (left_scale, right_scale, bias, rows, columns, inner)
    tiles = triton.cdiv(rows, way.rows) * triton.cdiv(columns, way.columns)
    with torch.cuda.device_of(left):  # Triton launches on the current device
        if way.kernel == "pointers":
            constants["DEEP"] = inner % way.inner == 0
            _POINTERS((tiles,), (left, right, words, *scales), constants, options)
            return result
        programs = min(tiles, way.resident * _multiprocessors(left.device))
        described = (
            TensorDescriptor.from_tensor(left, [way.rows, way.inner]),
            TensorDescriptor.from_tensor(right, [way.columns, way.inner]),
            TensorDescriptor.from_tensor(words, [way.rows, way.columns // (2 if way.halves else 1)]),
        )
        constants |= {"HALVES": way.halves, "PROGRAMS": programs}
        _DESCRIPTORS((programs,), (*described, *scales), constants, options)
    return result


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED:
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
