# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Magnitudes of hundreds of tensors in a few launches: each is read once, and a sample of it once more for formats.

What is counted, and why so, is told by `narrowgauge.gauges.feature_stats`. The bits of a float32 without their
sign order as its magnitude does, so a magnitude has reached a boundary where one integer is not below another:
three integer instructions for each element and boundary, and no flushing of small numbers can come between. What is
not finite is made zero, which reaches no boundary. A bf16 is read as the upper half of a float32's bits.

A program takes a tile of one tensor and writes a row of a table, in float64: counts are exact, and a tensor's rows
are added in an order that does not depend on timing. Where each tensor is, and which programs are its own, stands
in a table of integers (`_PLACES` columns, see `_placed`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._launches import CachedKernel
from narrowgauge.kernels._tables import sent

LOOKED = 5  # columns: absmax; how many are not finite, how many finite and not zero; the sums of |x| and of x
BOUNDARIES = 4  # columns of a format
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # by their number in the table
KINDS = {dtype: number for number, dtype in enumerate(DTYPES)}
ROW = 1024  # elements of what is sampled as one

_LOOKED, _BOUNDARIES, _ROW = tl.constexpr(LOOKED), tl.constexpr(BOUNDARIES), tl.constexpr(ROW)
_INFINITY = tl.constexpr(0x7F800000)
# Elements a program, 32 a thread: 16 make more reductions across threads, 64 leave room for fewer programs.
_TILE, _WARPS = 2**12, 4
_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": False}
# Of a vector: address; number of its dtype; elements; its first program; then of its sample every how many rows,
# from which, and how many.
_PLACES = 7
_WIDTH = tl.constexpr(_PLACES)
_TOGETHER, _COLUMNS = 64, 32  # rows that are added at once, and a power of two above any number of columns


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
    return tl.where(magnitude < _INFINITY, magnitude, 0)


@triton.jit
def _sums(bits, row):
    """Write the sums of a tile, as `LOOKED` has them."""
    magnitude = _finite_magnitude(bits)
    finite = (bits & 0x7FFFFFFF) < _INFINITY
    largest = tl.max(magnitude, 0).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(row, largest.to(tl.float64))
    tl.store(row + 1, tl.sum((finite == 0).to(tl.int32), 0).to(tl.float64))
    tl.store(row + 2, tl.sum((magnitude > 0).to(tl.int32), 0).to(tl.float64))
    wide = tl.where(finite, bits, 0).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(row + 3, tl.sum(tl.abs(wide), 0))
    tl.store(row + 4, tl.sum(wide, 0))


@triton.jit
def _look(places, owners, rows, TILE: tl.constexpr):
    """A row of sums of each tile."""
    program = tl.program_id(0)
    place = places + tl.load(owners + program) * _WIDTH
    at = (program - tl.load(place + 3)) * TILE + tl.arange(0, TILE)
    bits = bits_at(tl.load(place), tl.load(place + 1), at, at < tl.load(place + 2))
    _sums(bits, rows + program.to(tl.int64) * _LOOKED)


@triton.jit
def _look_at_one(address, elements, rows, KIND: tl.constexpr, TILE: tl.constexpr):
    """The same of one vector, without tables to be made and sent first."""
    program = tl.program_id(0).to(tl.int64)
    at = program * TILE + tl.arange(0, TILE)
    _sums(bits_at(address, KIND, at, at < elements), rows + program * _LOOKED)


@triton.jit
def _count(
    places, owners, factors, rows,
    TILE: tl.constexpr, FORMATS: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Of a tile of each sample: how many are finite and not zero, how many have reached each boundary."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    place = places + tensor * _WIDTH
    inside = tl.arange(0, TILE)
    sampled = (program - tl.load(place + 3)) * (TILE // _ROW) + inside // _ROW
    at = (tl.load(place + 5) + tl.load(place + 4) * sampled) * _ROW + inside % _ROW
    here = (sampled < tl.load(place + 6)) & (at < tl.load(place + 2))
    magnitude = _finite_magnitude(bits_at(tl.load(place), tl.load(place + 1), at, here))
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
    """The rows of each vector as one: added up, of the first column the largest if so."""
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


_LOOK, _LOOK_AT_ONE, _COUNT, _ADD = map(CachedKernel, (_look, _look_at_one, _count, _add))


def look(vectors: Sequence[Tensor]) -> Tensor:
    """Sums over all elements of vectors.

    Args:
        vectors: contiguous, of `DTYPES`, on one GPU.

    Returns:
        Float64 (vectors, LOOKED).
    """
    rows, tiles = look_at(vectors)
    return added(rows, tiles, largest=True)


def look_at(vectors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The same before the rows of each vector are added: float64 (rows, LOOKED), and how many each vector has."""
    tiles = [-(-vector.numel() // _TILE) for vector in vectors]
    places, owners = _placed(vectors, tiles, [(1, 0, 0)] * len(vectors))
    rows = torch.empty(sum(tiles), LOOKED, dtype=torch.float64, device=places.device)
    launch(_LOOK, (places, owners, rows), {"TILE": _TILE})
    return rows, tiles


def look_at_one(vector: Tensor) -> Tensor:
    """The same of one vector: (rows, LOOKED)."""
    elements = vector.numel()
    tiles = -(-elements // _TILE)
    rows = torch.empty(tiles, LOOKED, dtype=torch.float64, device=vector.device)
    if tiles:
        constants = {"KIND": KINDS[vector.dtype], "TILE": _TILE}
        with torch.cuda.device_of(rows):  # Triton launches on the current device
            _LOOK_AT_ONE((tiles,), (vector.data_ptr(), elements, rows), constants, _OPTIONS)
    return rows


def count(
    vectors: Sequence[Tensor],
    samples: Sequence[tuple[int, int]],
    bounds: tuple[tuple[float, float, float, float], ...],
    factors: Sequence[Tensor | None],
) -> Tensor:
    """What formats would make of vectors, of samples of their elements.

    Args:
        vectors: contiguous, of `DTYPES`, on one GPU.
        samples: for each vector every how many rows of `ROW` elements one is taken, and from which; of those rows
            that are whole, if it is not every one.
        bounds: for each format its four boundaries, numbers of float32.
        factors: for each what the vectors are multiplied by first, float32 (vectors,), or None.

    Returns:
        Float64 (vectors, 1 + 4 formats): how many sampled elements are finite and not zero, and how many of those
        have reached each boundary.
    """
    chosen = [taken(vector.numel(), *sample) for vector, sample in zip(vectors, samples, strict=True)]
    tiles = [-(-rows * ROW // _TILE) for _, _, rows in chosen]
    places, owners = _placed(vectors, tiles, chosen)
    scales = [factor for factor in factors if factor is not None]
    found = torch.stack(scales, dim=1) if scales else torch.empty(0, device=places.device)
    rows = torch.empty(sum(tiles), 1 + BOUNDARIES * len(bounds), dtype=torch.float64, device=places.device)
    constants = {"TILE": _TILE, **_constants(bounds, tuple(factor is not None for factor in factors))}
    launch(_COUNT, (places, owners, found, rows), constants)
    return added(rows, tiles, largest=False)


def added(rows: Tensor, counts: Sequence[int], largest: bool) -> Tensor:
    """Rows of vectors as one row each.

    Args:
        rows: float64 (rows, columns).
        counts: how many rows each vector has, in order.
        largest: whether the first column is that of the largest, not of the sum.

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


def taken(elements: int, share: int, first: int) -> tuple[int, int, int]:
    """Of a sample: every how many rows, from which, and how many."""
    whole = elements // ROW if share > 1 else -(-elements // ROW)
    return share, first, len(range(first, whole, share))


def _placed(
    vectors: Sequence[Tensor], tiles: Sequence[int], taken: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, Tensor]:
    """The table of places, int64 (vectors, _PLACES), and to which vector each program belongs, int32."""
    firsts = np.cumsum(tiles) - tiles if len(tiles) else np.zeros(0, np.int64)
    of = [
        (vector.data_ptr(), KINDS[vector.dtype], vector.numel(), first, *sample)
        for vector, first, sample in zip(vectors, firsts.tolist(), taken, strict=True)
    ]
    owners = np.repeat(np.arange(len(vectors), dtype=np.int32), tiles)
    device = vectors[0].device
    return sent(np.array(of, dtype=np.int64), device), sent(owners, device)


def launch(launches: CachedKernel, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a program for each owner, which come second."""
    programs = given[1].numel()
    if programs:
        with torch.cuda.device_of(given[0]):  # Triton launches on the current device
            launches((programs,), given, constants, _OPTIONS)


@functools.lru_cache(maxsize=64)
def _constants(bounds: tuple[tuple[float, ...], ...], scaled: tuple[bool, ...]) -> dict[str, Any]:
    """What formats are compiled to: boundaries by their bits, and which factor is whose."""
    packed = struct.pack(f"<{BOUNDARIES * len(bounds)}f", *(b for four in bounds for b in four))
    numbers = iter(range(len(scaled)))
    return {
        "FORMATS": len(bounds), "SCALED": tuple(next(numbers) if one else -1 for one in scaled),
        "SCALES": sum(scaled), "BITS": struct.unpack(f"<{BOUNDARIES * len(bounds)}i", packed),
    }  # fmt: skip
