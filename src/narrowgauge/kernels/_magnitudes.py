# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Magnitudes of a tensor in one pass over it, and in a second one if a format is scaled by the tensor's absmax.

What is counted, and why so, is told by `narrowgauge.gauges.feature_stats`. The bits of a float32 without their
sign order as its magnitude does, so a magnitude has reached a boundary where one integer is not below another:
three integer instructions for each element and boundary, and no flushing of small numbers can come between. What is
not finite is made zero, which reaches no boundary. A bf16 is read as the upper half of a float32's bits.

Each program takes a tile and writes a row of a table, in float64: counts are exact, and the rows are added by torch
in an order that does not depend on timing. Where eager torch reads a tensor some forty times for five formats, this
reads it twice.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SUMS = 5  # columns before those of the formats
BOUNDARIES = 4  # columns of a format
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_SUMS = tl.constexpr(SUMS)
_BOUNDARIES = tl.constexpr(BOUNDARIES)
_INFINITY = tl.constexpr(0x7F800000)
# Elements a program. 32 a thread: 68 instructions an element and 166 registers (four formats, bf16, sm_90), where
# 16 take 81 and 93, for the reductions across threads, and 64 leave room for one program a multiprocessor.
_TILE = 2**12
_WARPS = 4


@triton.jit
def _bits(x_ptr, base, n, TILE: tl.constexpr, BF16: tl.constexpr):
    """The float32 bits of a tile, zeros behind the tensor's end."""
    at = base + tl.arange(0, TILE)
    if base + TILE <= n:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0)
    if BF16:
        bits = x.to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _finite_magnitude(bits):
    """The bits of |x|, zero where x is not finite."""
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude < _INFINITY, magnitude, 0)


@triton.jit
def _count(row_ptr, magnitude, TILE: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Write how many magnitudes have reached each of four boundaries."""
    for place in tl.static_range(_BOUNDARIES):
        # Neither is negative: the sign of the difference says which is below, in one instruction less than a
        # comparison and a selection.
        below = tl.sum(-((magnitude - BITS[FIRST + place]) >> 31), 0)
        tl.store(row_ptr + _SUMS + COLUMN * _BOUNDARIES + place, (TILE - below).to(tl.float64))


@triton.jit(do_not_specialize=["n"])
def _plain(
    x_ptr, table_ptr, absmax_ptr, n,
    WIDTH: tl.constexpr, TILE: tl.constexpr, BF16: tl.constexpr,
    FORMATS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A row of sums, and counts of the formats as they are; the largest finite magnitude of the tile."""
    program = tl.program_id(0)
    base = program.to(tl.int64) * TILE
    bits = _bits(x_ptr, base, n, TILE, BF16)
    magnitude = _finite_magnitude(bits)
    finite = (bits & 0x7FFFFFFF) < _INFINITY
    row_ptr = table_ptr + program.to(tl.int64) * WIDTH
    tl.store(row_ptr, tl.minimum(n - base, TILE).to(tl.float64))
    tl.store(row_ptr + 1, tl.sum((finite == 0).to(tl.int32), 0).to(tl.float64))
    tl.store(row_ptr + 2, tl.sum((magnitude > 0).to(tl.int32), 0).to(tl.float64))
    wide = tl.where(finite, bits, 0).to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(row_ptr + 3, tl.sum(tl.abs(wide), 0))
    tl.store(row_ptr + 4, tl.sum(wide, 0))
    tl.store(absmax_ptr + program, tl.max(magnitude, 0).to(tl.int32).to(tl.float32, bitcast=True))
    for format in tl.static_range(FORMATS):
        _count(row_ptr, magnitude, TILE, COLUMNS[format], format * _BOUNDARIES, BITS)


@triton.jit(do_not_specialize=["n"])
def _scaled(
    x_ptr, table_ptr, factors_ptr, n,
    WIDTH: tl.constexpr, TILE: tl.constexpr, BF16: tl.constexpr,
    FORMATS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Counts of the formats that scale, into the same rows."""
    program = tl.program_id(0)
    base = program.to(tl.int64) * TILE
    magnitude = _finite_magnitude(_bits(x_ptr, base, n, TILE, BF16)).to(tl.float32, bitcast=True)
    row_ptr = table_ptr + program.to(tl.int64) * WIDTH
    for format in tl.static_range(FORMATS):
        product = magnitude * tl.load(factors_ptr + format)
        _count(row_ptr, product.to(tl.int32, bitcast=True), TILE, COLUMNS[format], format * _BOUNDARIES, BITS)


def measure(
    x: Tensor,
    bounds: tuple[tuple[float, float, float, float], ...],
    scales: tuple[float | None, ...],
    smallest: float,
) -> tuple[Tensor, Tensor]:
    """Sums and counts of a tensor's magnitudes.

    Args:
        x: contiguous tensor of float16, bfloat16 or float32 on the GPU, of at least one element.
        bounds: for each format its four boundaries, numbers of float32.
        scales: for each what absmax is scaled to, or None.
        smallest: the absmax below which a scaled tensor is zeros.

    Returns:
        Float64 (5 + 4 formats,), as in `FeatureStats.sums`, and the largest finite magnitude, 0-d float32.
    """
    n = x.numel()
    programs, width = triton.cdiv(n, _TILE), SUMS + BOUNDARIES * len(bounds)
    table = torch.empty(programs, width, dtype=torch.float64, device=x.device)
    absmax = torch.empty(programs, dtype=torch.float32, device=x.device)
    words = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    shape = {"WIDTH": width, "TILE": _TILE, "BF16": x.dtype == torch.bfloat16, "num_warps": _WARPS}
    plain, scaled = _constants(bounds, scales)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _plain[(programs,)](words, table, absmax, n, **shape, **plain)
        largest = absmax.amax()
        if scaled["FORMATS"]:
            # Between tensors, so that the division is rounded once.
            factors = [torch.full_like(largest, scale) / largest for scale in scales if scale is not None]
            found = torch.where(largest >= smallest, torch.stack(factors), 0.0)
            _scaled[(programs,)](words, table, found, n, **shape, **scaled)
    return table.sum(dim=0), largest


@functools.lru_cache(maxsize=64)
def _constants(
    bounds: tuple[tuple[float, ...], ...], scales: tuple[float | None, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the kernels of the formats as they are, and of those that scale, are compiled for."""
    found = []
    for scaled in (False, True):
        columns = tuple(column for column, scale in enumerate(scales) if (scale is not None) == scaled)
        packed = struct.pack(f"<{BOUNDARIES * len(columns)}f", *(b for column in columns for b in bounds[column]))
        bits = struct.unpack(f"<{BOUNDARIES * len(columns)}i", packed)
        found.append({"FORMATS": len(columns), "COLUMNS": columns, "BITS": bits})
    return found[0], found[1]
