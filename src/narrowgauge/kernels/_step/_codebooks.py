# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Moments over a scale: codes of a codebook, and float8 numbers, on a tile (blocks, elements of a block).

The specification is `narrowgauge.storage._blockwise`, bit for bit. `_codecs` says what the functions of a codec are
called and given, `_log_states` what an ordinary block is. KIND says what a scale is: of 0 no numbers are negative,
of 1 it is the block's extremum, of 2 its magnitude.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    ASSEMBLY,
    LARGEST,
    TINY,
    bits_of,
    column_max,
    column_min,
    exact_quotient,
    exact_reciprocal,
    float_of,
    from_e4m3,
    gather,
    tiny,
    to_e4m3,
)
from narrowgauge.kernels._step._packing import float8_as_words, float8_of, uppers_as_words

_HUGE = tl.constexpr(0x7E800000)  # bits of 2^126


@triton.jit
def codebook_decode(codes, scales, values, cells, ZERO: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr):
    return float_of(gather(values, codes)) * scales


@triton.jit
def codebook_encode(x, values, cells, ZERO: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr):
    y, scales = normalize(x, KIND != 0, KIND == 2)
    return _sums(y, cells, ZERO, FIRST, KIND) >> 16, scales


@triton.jit
def fast_codebook_encode(
    x, values, cells, ZERO: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    y, scales, unusual = fast_normalize(x, KIND != 0, KIND == 2)
    sums = _sums(y, cells, ZERO, FIRST, KIND)
    kept = codebook_decode(sums >> 16, scales, values, cells, ZERO, FIRST, KIND)
    return uppers_as_words(sums, BITS, PACKED), scales, kept, unusual


@triton.jit
def _sums(y, cells, ZERO: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr):
    """Codes in the upper halves, by a table with an entry for each upper half of a pattern from FIRST on.

    An entry is the code at the cell's start, and below it 16 bits. Added to a pattern's lower half they carry above
    the one boundary inside. Negative numbers mirror the positive ones around ZERO.
    """
    # Below the first cell all is zero. A NaN, or a number far from 1, is dealt with elsewhere.
    magnitude = tl.abs(y)
    if not ASSEMBLY:  # Triton 3.7's interpreter takes a NaN for the larger of it and a number
        magnitude = tl.where(y == y, magnitude, 0.0)
    bits = bits_of(tl.maximum(magnitude, float_of(tl.full([], FIRST << 16, tl.int32))))
    sums = gather(cells - FIRST, (bits >> 16) & 0x7FFF) + (bits & 0xFFFF)
    if KIND != 0:
        mirrored = tl.maximum((ZERO << 17 | 0xFFFF) - sums, 0)
        sums = tl.where(y < 0, mirrored, sums)
    return sums


@triton.jit
def float8_decode(codes, scales, KIND: tl.constexpr):
    return from_e4m3(codes.to(tl.uint8)) * scales


@triton.jit
def fast_float8_decode(words, scales, KIND: tl.constexpr):
    return float8_of(words) * scales


@triton.jit
def float8_encode(x, KIND: tl.constexpr):
    y, scales = normalize(x, KIND != 0, True)
    return to_e4m3(y * 448.0).to(tl.int32), tl.div_rn(scales, 448.0)


@triton.jit
def fast_float8_encode(x, KIND: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    y, extremum, unusual = fast_normalize(x, KIND != 0, True)
    words, scales = float8_as_words(y * 448.0, PACKED), exact_quotient(extremum, 448.0)
    # Below, the quotient would not be the nearest.
    unusual = unusual | ((extremum < 2.0**-119) & (extremum > 0))
    return words, scales, fast_float8_decode(words, scales, KIND), unusual


@triton.jit
def fast_normalize(x, SIGNED: tl.constexpr, POSITIVE: tl.constexpr):
    """x over its block's extremum, the extremum, its magnitude if scales are POSITIVE, and whether it is unusual.

    In ordinary blocks the product of a number and its rounded reciprocal may miss 1 by a unit in the last place. No
    code is so narrow that it would notice. Zeros are an ordinary block, as there are many where an embedding's rows
    have not been seen; their quotients are NaN, unless scales are POSITIVE, and a table takes those for 0.
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
def normalize(x, SIGNED: tl.constexpr, POSITIVE: tl.constexpr):
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
