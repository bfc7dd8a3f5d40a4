# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Magnitudes of hundreds of tensors in a few launches: each is read once, and a sample of it once more for formats.

`narrowgauge.gauges.feature_stats` defines what is counted. The bits of a float32 without sign order as its
magnitude does, so a magnitude has reached a boundary if one integer is not below another: three integer
instructions for each element and boundary, and no flushing of small numbers. What is not finite is made zero, which
reaches no boundary. A bf16 is read as the upper half of a float32's bits.

A program reads a tile of one tensor and writes a row of sums in float64: counts are exact, and a tensor's rows are
added in an order that does not depend on timing. A table of integers says where each tensor is (`tensor_table`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._launches import CachedKernel
from narrowgauge.kernels._step._floats import INFINITY
from narrowgauge.kernels._tables import sent

MEASURED = 5  # columns: absmax; numbers of non-finite, and of finite nonzero elements; the sums of |x| and of x
BOUNDARIES = 4  # columns of a format
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # by their number in a table
ROW = 1024  # elements

_MEASURED, _BOUNDARIES, _ROW = tl.constexpr(MEASURED), tl.constexpr(BOUNDARIES), tl.constexpr(ROW)
# Elements a program, 32 a thread: 16 make more reductions across threads, 64 leave room for fewer programs.
_TILE, _WARPS = 2**12, 4
_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": False}
# Columns of `tensor_table`: elements; first program; the sample's stride, first row and number of rows; then
# address and dtype of each input.
HEAD = 5
_TOGETHER, _COLUMNS = 64, 32  # rows that are added at once, and a power of two above any number of columns
_WIDTH, _INPUT = tl.constexpr(HEAD + 2), tl.constexpr(HEAD)


@triton.jit
def bits_at(address, kind, at, here):
    """The float32 bits of elements, zero where there are none."""
    if kind == 0:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=here, other=0).to(tl.int32) << 16
    elif kind == 1:
        half = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=here, other=0.0)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=here, other=0)
    return bits


@triton.jit
def _finite_magnitude(bits):
    """The bits of |x|, zero where x is not finite."""
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude < INFINITY, magnitude, 0)


@triton.jit
def _sums(bits, row):
    """Write the sums of a tile, as `MEASURED` has them."""
    magnitude = _finite_magnitude(bits)
    finite = (bits & 0x7FFFFFFF) < INFINITY
    largest = tl.max(magnitude, 0).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(row, largest.to(tl.float64))
    tl.store(row + 1, tl.sum((finite == 0).to(tl.int32), 0).to(tl.float64))
    tl.store(row + 2, tl.sum((magnitude > 0).to(tl.int32), 0).to(tl.float64))
    wide = tl.where(finite, bits, 0).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(row + 3, tl.sum(tl.abs(wide), 0))
    tl.store(row + 4, tl.sum(wide, 0))


@triton.jit
def _tile_sums(table, owners, rows, TILE: tl.constexpr):
    """A row of sums for each tile."""
    program = tl.program_id(0)
    entry = table + tl.load(owners + program) * _WIDTH
    at = (program - tl.load(entry + 1)) * TILE + tl.arange(0, TILE)
    bits = bits_at(tl.load(entry + _INPUT), tl.load(entry + _INPUT + 1), at, at < tl.load(entry))
    _sums(bits, rows + program.to(tl.int64) * _MEASURED)


@triton.jit
def _tile_sums_of_one(address, elements, rows, KIND: tl.constexpr, TILE: tl.constexpr):
    """The same for one vector, without tables to make and send."""
    program = tl.program_id(0).to(tl.int64)
    at = program * TILE + tl.arange(0, TILE)
    _sums(bits_at(address, KIND, at, at < elements), rows + program * _MEASURED)


@triton.jit
def _count(
    table, owners, factors, rows,
    TILE: tl.constexpr, FORMATS: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """For each tile of a sample: how many elements are finite and nonzero, how many have reached each boundary."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    entry = table + tensor * _WIDTH
    inside = tl.arange(0, TILE)
    sampled = (program - tl.load(entry + 1)) * (TILE // _ROW) + inside // _ROW
    at = (tl.load(entry + 3) + tl.load(entry + 2) * sampled) * _ROW + inside % _ROW
    here = (sampled < tl.load(entry + 4)) & (at < tl.load(entry))
    magnitude = _finite_magnitude(bits_at(tl.load(entry + _INPUT), tl.load(entry + _INPUT + 1), at, here))
    row = rows + program.to(tl.int64) * (1 + FORMATS * _BOUNDARIES)
    tl.store(row, tl.sum((magnitude > 0).to(tl.int32), 0).to(tl.float64))
    for format in tl.static_range(FORMATS):
        size = magnitude
        if SCALED[format] >= 0:
            factor = tl.load(factors + tensor * SCALES + SCALED[format])
            size = (magnitude.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
        for boundary in tl.static_range(_BOUNDARIES):
            # Neither is negative: the sign of the difference says which is below, in one instruction less than a
            # comparison and a selection.
            below = tl.sum(-((size - BITS[format * _BOUNDARIES + boundary]) >> 31), 0)
            tl.store(row + 1 + format * _BOUNDARIES + boundary, (TILE - below).to(tl.float64))


@triton.jit
def _add(
    rows, ends, sums, WIDTH: tl.constexpr, LARGEST: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the rows of each vector; of the first column take the largest if LARGEST."""
    vector = tl.program_id(0)
    down, across = tl.arange(0, TOGETHER)[:, None], tl.arange(0, COLUMNS)[None, :]
    end = tl.load(ends + vector + 1)
    total = tl.zeros([TOGETHER, COLUMNS], tl.float64)
    at = tl.load(ends + vector)
    while at < end:
        here = (at + down < end) & (across < WIDTH)
        more = tl.load(rows + (at + down).to(tl.int64) * WIDTH + across, mask=here, other=0.0)
        total = tl.where((across == 0) & LARGEST, tl.maximum(total, more), total + more)
        at += TOGETHER
    found = tl.where((tl.arange(0, COLUMNS) == 0) & LARGEST, tl.max(total, 0), tl.sum(total, 0))
    tl.store(sums + vector * WIDTH + tl.arange(0, COLUMNS), found, mask=tl.arange(0, COLUMNS) < WIDTH)


_TILE_SUMS, _TILE_SUMS_OF_ONE, _COUNT, _ADD = map(CachedKernel, (_tile_sums, _tile_sums_of_one, _count, _add))


def measure(vectors: Sequence[Tensor]) -> Tensor:
    """Sums over all elements of vectors (contiguous, of `DTYPES`, on one GPU): float64 (vectors, MEASURED)."""
    tiles = [-(-vector.numel() // _TILE) for vector in vectors]
    table, owners = tensor_table([vectors], tiles, [(1, 0, 0)] * len(vectors))
    rows = torch.empty(sum(tiles), MEASURED, dtype=torch.float64, device=table.device)
    launch(_TILE_SUMS, (table, owners, rows), {"TILE": _TILE})
    return add_rows(rows, tiles, largest=True)


def tile_sums(vector: Tensor) -> Tensor:
    """The sums of each tile of one vector, to be added: float64 (tiles, MEASURED)."""
    elements = vector.numel()
    tiles = -(-elements // _TILE)
    rows = torch.empty(tiles, MEASURED, dtype=torch.float64, device=vector.device)
    if tiles:
        constants = {"KIND": DTYPES.index(vector.dtype), "TILE": _TILE}
        with torch.cuda.device_of(rows):  # Triton launches on the current device
            _TILE_SUMS_OF_ONE((tiles,), (vector.data_ptr(), elements, rows), constants, _OPTIONS)
    return rows


def count(
    vectors: Sequence[Tensor],
    samples: Sequence[tuple[int, int]],
    bounds: tuple[tuple[float, float, float, float], ...],
    factors: Sequence[Tensor | None],
) -> Tensor:
    """What formats would lose of vectors, counted on samples of their rows.

    Args:
        vectors: contiguous, of `DTYPES`, on one GPU.
        samples: for each vector the stride between sampled rows of `ROW` elements, and the first of them; with a
            stride above 1 only whole rows are sampled.
        bounds: for each format its four boundaries, numbers of float32.
        factors: for each what the vectors are multiplied by first, float32 (vectors,); None for 1.

    Returns:
        Float64 (vectors, 1 + 4 formats): how many sampled elements are finite and nonzero, and how many of those
        have reached each boundary.
    """
    chosen = [sampled_rows(vector.numel(), *sample) for vector, sample in zip(vectors, samples, strict=True)]
    tiles = [-(-rows * ROW // _TILE) for _, _, rows in chosen]
    table, owners = tensor_table([vectors], tiles, chosen)
    scales = [factor for factor in factors if factor is not None]
    found = torch.stack(scales, dim=1) if scales else torch.empty(0, device=table.device)
    rows = torch.empty(sum(tiles), 1 + BOUNDARIES * len(bounds), dtype=torch.float64, device=table.device)
    constants = {"TILE": _TILE, **_constants(bounds, tuple(factor is not None for factor in factors))}
    launch(_COUNT, (table, owners, found, rows), constants)
    return add_rows(rows, tiles, largest=False)


def add_rows(rows: Tensor, counts: Sequence[int], largest: bool) -> Tensor:
    """Add the rows of each vector, of the first column take the largest if `largest`.

    Args:
        rows: float64 (rows, columns).
        counts: number of rows of each vector, in order.

    Returns:
        Float64 (vectors, columns), zeros for a vector without rows.
    """
    columns = rows.shape[1]
    ends = sent(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), rows.device)
    sums = torch.empty(len(counts), columns, dtype=torch.float64, device=rows.device)
    if counts:
        constants = {"WIDTH": columns, "LARGEST": largest, "TOGETHER": _TOGETHER}
        constants["COLUMNS"] = max(_COLUMNS, triton.next_power_of_2(columns))
        with torch.cuda.device_of(rows):
            _ADD((len(counts),), (rows, ends, sums), constants, _OPTIONS)
    return sums


def sampled_rows(elements: int, stride: int, first: int) -> tuple[int, int, int]:
    """Of a sample: the stride between its rows, the first of them, and their number."""
    whole = elements // ROW if stride > 1 else -(-elements // ROW)
    return stride, first, len(range(first, whole, stride))


def tensor_table(
    inputs: Sequence[Sequence[Tensor]], programs: Sequence[int], samples: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, Tensor]:
    """Where the tensors of a launch are.

    Args:
        inputs: for each input of the kernel the vectors of all tensors; the first one's lengths are the tensors'.
        programs: number of programs of each tensor.
        samples: as `sampled_rows` returns them.

    Returns:
        The table, int64 (tensors, HEAD + 2 inputs); and to which tensor each program belongs, int32 (programs,).
    """
    firsts = (np.cumsum(programs) - programs).tolist()
    heads = [(x.numel(), first, *sample) for x, first, sample in zip(inputs[0], firsts, samples, strict=True)]
    columns = [[(x.data_ptr(), DTYPES.index(x.dtype)) for x in vectors] for vectors in inputs]
    table = np.array([sum(parts, head) for head, *parts in zip(heads, *columns, strict=True)], dtype=np.int64)
    owners = np.repeat(np.arange(len(heads), dtype=np.int32), programs)
    device = inputs[0][0].device
    return sent(table, device), sent(owners, device)


def launch(kernel: CachedKernel, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a kernel, with one program for each element of the second argument, the owners."""
    programs = given[1].numel()
    if programs:
        with torch.cuda.device_of(given[0]):  # Triton launches on the current device
            kernel((programs,), given, constants, _OPTIONS)


@functools.lru_cache(maxsize=64)
def _constants(bounds: tuple[tuple[float, ...], ...], scaled: tuple[bool, ...]) -> dict[str, Any]:
    """Formats as compile-time constants: the bits of their boundaries, and the index of their factors."""
    bits = np.array(bounds, dtype=np.float32).reshape(-1).view(np.int32)
    numbers = itertools.count()
    return {
        "FORMATS": len(bounds), "SCALED": tuple(next(numbers) if one else -1 for one in scaled),
        "SCALES": sum(scaled), "BITS": tuple(bits.tolist()),
    }  # fmt: skip
