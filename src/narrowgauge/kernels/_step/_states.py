# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Moments on a tile (blocks, elements of a block): decoded, and encoded again.

The specification is `narrowgauge.storage._states`, bit for bit. Codes are bytes here; those of 4 bits are packed
and unpacked by `pack` and `unpack`. What a block keeps besides is a column (blocks, 1).

Almost every block is an ordinary one: its elements are finite, and far enough from float32's ends that nothing
under- or overflows. `usual_*_encode` are for those, and also say, a block, whether it is none; then everything is
done again with care, by what has no such prefix. The largest element is found among integers, which a warp reduces
by one instruction; as unsigned numbers, bits of what is negative, infinite or no number lie above those of all that
is ordinary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    INFINITY,
    ROUNDER,
    SMALLEST,
    TINY,
    bits_of,
    exact_quotient,
    exact_reciprocal,
    float_of,
    tiny,
)

_HUGE = tl.constexpr(0x7E800000)  # bits of 2^126
# Bits of 2^118, eight binades below: a step of a pattern of 4 bits may be four.
_HIGH = tl.constexpr(_HUGE.value - (8 << 23))


@triton.jit
def column_max(x):
    return tl.max(x, 1, keep_dims=True)


@triton.jit
def column_min(x):
    return tl.min(x, 1, keep_dims=True)


@triton.jit
def column_peak(x):
    """The bits of the largest magnitude; of something above infinity if one is no number."""
    if x.shape[1] < 256:
        return column_max(bits_of(x) & 0x7FFFFFFF)
    else:
        # Among eight neighbours, which a thread has, as floats: that takes the sign off on the way.
        some = tl.reduce(tl.abs(x).reshape([x.shape[0], x.shape[1] // 8, 8]), 2, _larger)
        return column_max(bits_of(some))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def unpack(codes, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Codes of 4 bits, two a byte, the first in its lower half."""
    k = codes.to(tl.int32)
    return tl.join(k & 0xF, k >> 4).reshape([ROWS, SIZE])


@triton.jit
def pack(codes, ROWS: tl.constexpr, SIZE: tl.constexpr):
    first, second = tl.split(codes.reshape([ROWS, SIZE // 2, 2]))
    return first | (second << 4)


# Second moments of log8 and log4: `storage._pattern_codes`.


@triton.jit
def pattern8_decode(codes, ranges):
    return _pattern_value(codes, ranges & ~0xFFF, 1 << tl.minimum(ranges & 0xFFF, 30))


@triton.jit
def usual_pattern8_decode(codes, ranges):
    """The same where no code is 0, or all of a block are."""
    step = 1 << tl.minimum(ranges & 0xFFF, 30)
    return float_of(codes * step + tl.where(ranges != 0, (ranges & ~0xFFF) - step, 0))


@triton.jit
def pattern4_decode(codes, base, step):
    return _pattern_value(codes, base, step)


@triton.jit
def pattern8_encode(x, random):
    """(codes, ranges, what they stand for), rounded by random bits in the upper halves of 32."""
    codes, base, step, kept = _pattern_encode(bits_of(x), random, 8)
    # A step is 2^s: the exponent of the float that it is. A block of zeros keeps zero.
    s = (bits_of(step.to(tl.float32)) >> 23) - 127
    return codes, tl.where(base > 0, base + s, 0), kept


@triton.jit
def usual_pattern8_encode(x, random):
    bits = bits_of(x)
    lo, hi, unusual = _bounds(bits, 8)
    base, step, s = _range(lo, hi, 8)
    codes, kept = _pattern_codes(bits, _offset(base, step, hi), step, s, random, 8)
    return codes, tl.where(hi > 0, base + s, 0), float_of(kept), unusual


@triton.jit
def pattern4_encode(x, random):
    """(codes, base, step, what they stand for), likewise."""
    return _pattern_encode(bits_of(x), random, 4)


@triton.jit
def usual_pattern4_encode(x, random):
    bits = bits_of(x)
    lo, hi, unusual = _bounds(bits, 4)
    base, step, s = _range(lo, hi, 4)
    codes, kept = _pattern_codes(bits, _offset(base, step, hi), step, s, random, 4)
    return codes, base, tl.where(hi > 0, step, 0), float_of(kept), unusual


@triton.jit
def _pattern_value(codes, base, step):
    k = codes.to(tl.int32)
    return float_of(tl.where(k > 0, k * step + (base - step), 0))


@triton.jit
def _bounds(bits, BITS: tl.constexpr):
    """Least and largest of a block, and whether it is unusual, which all zeros are not."""
    hi, lo = column_max(bits), column_min(bits)
    span: tl.constexpr = (63 if BITS == 8 else 48) << 23
    # In the topmost binades a code might stand for more than float32's largest number.
    return lo, hi, ((lo < SMALLEST) & ((lo | hi) != 0)) | (hi >= _HIGH) | (hi - lo > span)


@triton.jit
def _offset(base, step, hi):
    """What is added to patterns before they are divided by the step: code 1 is the base's, zeros alone have 0."""
    return tl.where(hi > 0, step - base, 0)


@triton.jit
def _pattern_codes(bits, offset, step, s, random, BITS: tl.constexpr):
    if BITS == 8:
        more = (random >> (32 - s).to(tl.uint32)).to(tl.int32)
        codes = (bits + offset + more) >> s
    else:
        more = ((random >> 16).to(tl.uint64) * step.to(tl.uint64) >> 16).to(tl.int32)
        # A quotient of 16 at most: a float's is off by one where it is next to a whole one, and nowhere else.
        far = bits + offset + more
        codes = (far.to(tl.float32) * tl.div_rn(1.0, step.to(tl.float32))).to(tl.int32)
        codes -= (codes * step > far).to(tl.int32)
        codes += ((codes + 1) * step <= far).to(tl.int32)
    return codes, codes * step - offset


@triton.jit
def _pattern_encode(bits, random, BITS: tl.constexpr):
    magnitude = bits & 0x7FFFFFFF
    wild = magnitude >= INFINITY
    there = (bits >= SMALLEST) & (wild == 0)
    hi = column_max(tl.where(there, bits, 0))
    wild = wild & (bits != -0x800000)
    hi = tl.where((hi == 0) & (column_max(wild.to(tl.int32)) > 0), INFINITY - 1, hi)
    lo = column_min(tl.where(there, bits, INFINITY - 1))
    span: tl.constexpr = (63 if BITS == 8 else 48) << 23
    lo = tl.maximum(tl.minimum(lo, hi), tl.maximum(hi - span, SMALLEST))
    # A block of zeros has codes that are masked, whatever they are.
    base, step, s = _range(lo, tl.maximum(hi, lo), BITS)
    clamped = tl.where(wild, hi, tl.maximum(bits, lo))
    codes, _ = _pattern_codes(clamped, step - base, step, s, random, BITS)
    # The constant last: Triton 3.7 makes a constant of what begins with one, and its interpreter refuses that.
    codes = tl.minimum(codes, (-base + (INFINITY - 1)) // step + 1)
    codes = tl.where((there | wild) & (hi > 0), codes, 0)
    kept = tl.where(codes > 0, codes * step + (base - step), 0)
    return codes, tl.where(hi > 0, base, 0), tl.where(hi > 0, step, 0), float_of(kept)


@triton.jit
def _range(lo, hi, BITS: tl.constexpr):
    """(base, step, s): a step is 2^s in 8 bits; in 4 bits s means nothing."""
    if BITS == 8:
        s = tl.maximum(_bit_length((hi - lo) >> 8), 12)
        s += (((hi + (1 << s) - 1) >> s) - (lo >> s) > 254).to(tl.int32)
        return (lo >> s) << s, 1 << s, s
    else:
        step = tl.maximum((hi - lo + 13) // 14, 1)
        return lo, step, step


@triton.jit
def _bit_length(x):
    return tl.maximum((bits_of(x.to(tl.float32)) >> 23) - 126, 0)


# First moments of log8 and log4: `storage._relative_codes`.


@triton.jit
def unit_bits(v):
    """Bits of the unit, a power of two, for each element of a second moment."""
    return ((bits_of(v) >> 1) + (127 << 22)) & (255 << 23)


@triton.jit
def relative_decode(numbers, scales, v):
    """The moment; v is the second moment as it was kept beside it, or None."""
    quotient = numbers * scales
    return quotient if v is None else quotient * float_of(unit_bits(v))


@triton.jit
def usual_relative_encode(m, v, BITS: tl.constexpr):
    """(codes, scales, what is lost of m); v is the second moment as it is kept now, or None."""
    outermost: tl.constexpr = 127.0 if BITS == 8 else 6.0
    q, unit = _quotient(m, v)
    top = column_peak(q)
    scales = exact_quotient(float_of(top), outermost)
    codes, kept = _relative_codes(q, scales, exact_reciprocal(tl.maximum(scales, TINY)), BITS)
    lost = m - kept if v is None else tl.fma(-kept, unit, m)
    # 127 times the smallest scale lies below 2^-119. Units are at most 2^64: below 2^60 nothing overflows.
    return codes, scales, lost, tiny(top, 8) | (top >= (187 << 23))


@triton.jit
def relative_encode(m, v, BITS: tl.constexpr):
    outermost: tl.constexpr = 127.0 if BITS == 8 else 6.0
    q, unit = _quotient(m, v)
    q = tl.where((bits_of(q) & INFINITY) == INFINITY, 0.0, q)
    scales = tl.div_rn(float_of(column_max(bits_of(q) & 0x7FFFFFFF)), outermost)
    scales = tl.where(scales >= TINY, scales, 0.0)
    inverse = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
    codes, kept = _relative_codes(q, scales, inverse, BITS)
    lost = m - (kept if v is None else kept * unit)
    return codes, scales, tl.where((bits_of(lost) & INFINITY) == INFINITY, 0.0, lost)


@triton.jit
def _quotient(m, v):
    """m in its units, and the units, which are powers of two."""
    if v is None:
        return m, m
    else:
        unit = unit_bits(v)
        return m * float_of((254 << 23) - unit), float_of(unit)


@triton.jit
def _relative_codes(q, scales, inverse, BITS: tl.constexpr):
    """Codes, and what they stand for before the unit."""
    if BITS == 8:
        rounded = q * inverse + ROUNDER
        return bits_of(rounded), (rounded - ROUNDER) * scales
    else:
        y = q * inverse
        z = tl.abs(y)
        # From 1 on these are the floats with one bit of fraction; less than half of its unit never carries.
        k = tl.where(z > 0.75, 2, tl.where(z > 0.25, 1, 0))
        k = tl.where(z > 1.0, ((bits_of(z) + 0x1FFFFF) >> 22) - 252, k)
        codes = tl.where((y < 0) & (k > 0), k + 8, k)
        return codes, relative_number(codes, 4) * scales


@triton.jit
def relative_number(codes, BITS: tl.constexpr):
    k = codes.to(tl.int32)
    if BITS == 8:
        return float_of((k ^ 0x80) & 0xFF | 0x4B000000) - 8388736.0
    else:
        # Exponent and fraction where a float has them; its own exponent is 126 larger.
        return float_of(((k & 7) << 22) | ((k & 8) << 28)) * 2.0**126
