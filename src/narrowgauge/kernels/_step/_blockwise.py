# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Moments over a scale: codes of a codebook, and float8 numbers, on a tile (blocks, elements of a block).

The specification is `narrowgauge.storage._blockwise`, bit for bit. See `_states` for what an ordinary block is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    ASSEMBLY,
    LARGEST,
    TINY,
    bits_of,
    exact_quotient,
    exact_reciprocal,
    float_of,
    gather,
    tiny,
    to_e4m3,
)
from narrowgauge.kernels._step._states import column_max, column_min

_HUGE = tl.constexpr(0x7E800000)  # bits of 2^126


@triton.jit
def table_decode(codes, scales, values):
    return float_of(gather(values, codes.to(tl.int32))) * scales


@triton.jit
def table_encode(x, cells, AT: tl.constexpr, SIGNED: tl.constexpr, MIRROR: tl.constexpr):
    """(codes, scales)."""
    y, scales = _normalise(x, SIGNED, False)
    return _table_sums(y, cells, AT, SIGNED, MIRROR) >> 16, scales


@triton.jit
def usual_table_encode(x, cells, AT: tl.constexpr, SIGNED: tl.constexpr, MIRROR: tl.constexpr):
    """(codes in the upper halves of 32 bits, scales, whether a block is unusual)."""
    y, scales, unusual = _usual_normalise(x, SIGNED, False)
    return _table_sums(y, cells, AT, SIGNED, MIRROR), scales, unusual


@triton.jit
def _table_sums(y, cells, AT: tl.constexpr, SIGNED: tl.constexpr, MIRROR: tl.constexpr):
    """Codes, in the upper halves, by a table with one entry a cell of the leading 16 bits, from AT on.

    An entry is the code at the cell's start, and below it what the lower 16 bits have to add up with to carry where
    they are above the one boundary inside. Negative numbers mirror the positive ones around code MIRROR / 2.
    """
    # Below the first cell all is zero; what is no number, or far from one, is dealt with elsewhere.
    magnitude = tl.abs(y)
    if not ASSEMBLY:  # Triton 3.7's interpreter says of what is no number and a number that the larger is no number
        magnitude = tl.where(y == y, magnitude, 0.0)
    bits = bits_of(tl.maximum(magnitude, float_of(tl.full([], AT << 16, tl.int32))))
    sums = gather(cells - AT, (bits >> 16) & 0x7FFF) + (bits & 0xFFFF)
    if SIGNED:
        mirrored = tl.maximum((MIRROR << 16 | 0xFFFF) - sums, 0)
        sums = tl.where(y < 0, mirrored, sums)
    return sums


@triton.jit
def e4m3_encode(x, SIGNED: tl.constexpr):
    y, scales = _normalise(x, SIGNED, True)
    return to_e4m3(y * 448.0), tl.div_rn(scales, 448.0)


@triton.jit
def usual_e4m3_encode(x, SIGNED: tl.constexpr):
    """(numbers to be rounded, scales, whether a block is unusual)."""
    y, scales, unusual = _usual_normalise(x, SIGNED, True)
    # Below, the quotient would not be the nearest.
    return y * 448.0, exact_quotient(scales, 448.0), unusual | ((scales < 2.0**-119) & (scales > 0))


@triton.jit
def _usual_normalise(x, SIGNED: tl.constexpr, POSITIVE: tl.constexpr):
    """x over its block's extremum, the extremum, its magnitude if scales are POSITIVE, and whether it is unusual.

    In ordinary blocks the product of a number and its rounded reciprocal may miss 1 by a unit in the last place. No
    code is so narrow that it would notice. Zeros are an ordinary block, as there are many where an embedding's rows
    have not been seen; their quotients are no numbers, unless scales are POSITIVE, and a table takes those for 0.
    """
    bits = bits_of(x)
    if SIGNED:
        positive = column_max(bits)
        negative = column_max(bits.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
        other = tl.where(negative < 0, negative & 0x7FFFFFFF, -1)
        top = tl.maximum(positive, other)
        unusual = tiny(top, 1) | (top >= _HUGE)
        if POSITIVE:
            # Zeros with a sign come without it.
            unusual = unusual | ((top == 0) & (negative < 0))
        else:
            unusual = unusual | (positive == other)
        extremum = float_of(top)
        if not POSITIVE:
            extremum = tl.where(other > positive, -extremum, extremum)
    else:
        top = column_max(bits.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
        unusual = tiny(top, 1) | (top >= _HUGE)
        extremum = float_of(top)
    divisor = tl.maximum(extremum, TINY) if POSITIVE else extremum
    return x * exact_reciprocal(divisor), extremum, unusual


@triton.jit
def _normalise(x, SIGNED: tl.constexpr, POSITIVE: tl.constexpr):
    if not SIGNED:
        x = tl.where(x == x, tl.maximum(x, 0.0), x)
    magnitude = tl.abs(x)
    infinite = magnitude == float("inf")
    bounded = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)
    # Infinities come before what counts as zero and after all else.
    key = bits_of(tl.where(infinite, TINY / 2, tl.where(magnitude >= TINY, magnitude, 0.0)))
    place = tl.broadcast_to(tl.arange(0, x.shape[1])[None, :], x.shape)
    first = column_min(tl.where(key == column_max(key), place, x.shape[1]))
    extremum = float_of(column_max(tl.where(place == first, bits_of(tl.abs(bounded)), 0)))
    sign = column_max(tl.where((place == first) & (bounded < 0), 1, 0))
    empty = extremum < TINY
    signed = extremum if POSITIVE or not SIGNED else tl.where(sign > 0, -extremum, extremum)
    extremum = tl.where(empty, 0.0, extremum)
    signed = tl.where(empty, 0.0, signed)
    quarter = tl.where(extremum >= 2.0**126, 0.25, 1.0)
    inverse = tl.where(empty, 0.0, tl.div_rn(1.0, tl.where(empty, 1.0, signed * quarter)))
    y = bounded * quarter * inverse
    one = tl.where(bounded > 0, 1.0, tl.where(bounded < 0, -1.0, 0.0))
    one = tl.where(signed < 0, -one, tl.where(signed > 0, one, 0.0))
    return tl.where(tl.abs(bounded) == extremum, one, y), signed
