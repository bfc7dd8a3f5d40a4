# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Moments of `log8` and `log4` on a tile (blocks, elements of a block): decoded, and encoded again.

The specification is `narrowgauge.storage._log_states`, bit for bit, and `_codecs` says what the functions of a
codec are called and given.

Almost every block is an ordinary one: its elements are finite, and far enough from float32's ends that nothing
under- or overflows. `fast_*_encode` are for those, and also tell which blocks are not. The largest element is found
among integers, which a warp reduces by one instruction; as unsigned numbers, bits of what is negative, infinite or
NaN lie above those of all that is ordinary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    INFINITY,
    LARGEST,
    ROUNDER,
    SMALLEST,
    TINY,
    bits_of,
    column_max,
    column_min,
    column_peak,
    exact_quotient,
    exact_ratio,
    exact_reciprocal,
    float_of,
    if_finite,
    is_unknown,
    nearest,
    tiny,
)
from narrowgauge.kernels._step._packing import as_words, codes_of, numbers_of, zeros_in

# Bits of 2^118, eight binades below 2^126: a step of a pattern of 4 bits may be four.
_HIGH = tl.constexpr(0x7E800000 - (8 << 23))


# log_unsigned: second moments, in steps of the bit pattern.


@triton.jit
def log_unsigned8_decode(codes, ranges):
    return _pattern_value(codes, ranges & ~0xFFF, 1 << tl.minimum(ranges & 0xFFF, 30))


@triton.jit
def fast_log_unsigned8_decode(words, ranges):
    """The same where no code is 0, or all of a block are."""
    step = 1 << tl.minimum(ranges & 0xFFF, 30)
    return float_of(codes_of(words) * step + tl.where(ranges != 0, (ranges & ~0xFFF) - step, 0))


@triton.jit
def log_unsigned8_decode_unusual(words, ranges):
    # Code 0 is rare among others; where all of a block's are 0, it has no range.
    return zeros_in(words) & tl.where(ranges != 0, -1, 0)


@triton.jit
def log_unsigned8_encode(x, random):
    codes, base, step = _pattern_encode(bits_of(x), random, 8)
    # A step is 2^s: the exponent of the float that it is. A block of zeros keeps zero.
    s = (bits_of(step.to(tl.float32)) >> 23) - 127
    return codes, tl.where(base > 0, base + s, 0)


@triton.jit
def fast_log_unsigned8_encode(x, random, BITS: tl.constexpr, PACKED: tl.constexpr):
    bits = bits_of(x)
    lo, hi, unusual = _bounds(bits, 8)
    base, step, s = _range(lo, hi, 8)
    codes, kept = _pattern_codes(bits, _offset(base, step, hi), step, s, random, 8)
    return as_words(codes, BITS, PACKED), tl.where(hi > 0, base + s, 0), float_of(kept), unusual


@triton.jit
def log_unsigned4_encode(x, random):
    return _pattern_encode(bits_of(x), random, 4)


@triton.jit
def fast_log_unsigned4_encode(x, random, BITS: tl.constexpr, PACKED: tl.constexpr):
    bits = bits_of(x)
    lo, hi, unusual = _bounds(bits, 4)
    base, step, s = _range(lo, hi, 4)
    codes, kept = _pattern_codes(bits, _offset(base, step, hi), step, s, random, 4)
    return as_words(codes, BITS, PACKED), base, tl.where(hi > 0, step, 0), float_of(kept), unusual


@triton.jit
def _pattern_value(codes, base, step):
    k = codes.to(tl.int32)
    return float_of(tl.where(k > 0, k * step + (base - step), 0))


log_unsigned4_decode = _pattern_value


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
        # A quotient of 16 at most: in float32 it is off by one only next to an integer.
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
    return codes, tl.where(hi > 0, base, 0), tl.where(hi > 0, step, 0)


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


# normalized: first moments in units of the second's root. v is the second moment as it is kept, or None.


@triton.jit
def normalized8_decode(codes, scales, v):
    return _normalized_value(float_of((codes ^ 0x80) & 0xFF | 0x4B000000) - 8388736.0, scales, v)


@triton.jit
def fast_normalized8_decode(words, scales, v):
    return _normalized_value(numbers_of(words), scales, v)


@triton.jit
def normalized4_decode(codes, scales, v):
    return _normalized_value(_number4(codes), scales, v)


@triton.jit
def normalized8_encode(m, v):
    return _normalized_encode(m, v, 8)


@triton.jit
def normalized4_encode(m, v):
    return _normalized_encode(m, v, 4)


@triton.jit
def _unit_bits(v):
    """Bits of the unit, a power of two, for each element of a second moment."""
    return ((bits_of(v) >> 1) + (127 << 22)) & (255 << 23)


@triton.jit
def _normalized_value(numbers, scales, v):
    quotient = numbers * scales
    return quotient if v is None else quotient * float_of(_unit_bits(v))


@triton.jit
def fast_normalized8_encode(m, v, BITS: tl.constexpr, PACKED: tl.constexpr):
    outermost: tl.constexpr = 127.0 if BITS == 8 else 6.0
    q, unit = _quotient(m, v)
    top = column_peak(q)
    scales = exact_quotient(float_of(top), outermost)
    codes, kept = _normalized_codes(q, scales, exact_reciprocal(tl.maximum(scales, TINY)), BITS)
    lost = m - kept if v is None else tl.fma(-kept, unit, m)
    # 127 times the smallest scale lies below 2^-119. Units are at most 2^64: below 2^60 nothing overflows. From 64
    # on there may be an unknown one.
    limit: tl.constexpr = (187 if v is None else 133) << 23
    return as_words(codes, BITS, PACKED), scales, lost, tiny(top, 8) | (top >= limit)


fast_normalized4_encode = fast_normalized8_encode


@triton.jit
def _normalized_encode(m, v, BITS: tl.constexpr):
    outermost: tl.constexpr = 127.0 if BITS == 8 else 6.0
    if v is not None:
        m = tl.where(is_unknown(m, v), 0.0, m)
    q, _ = _quotient(m, v)
    q = if_finite(q)
    scales = tl.div_rn(float_of(column_max(bits_of(q) & 0x7FFFFFFF)), outermost)
    scales = tl.where(scales >= TINY, scales, 0.0)
    inverse = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
    codes, _ = _normalized_codes(q, scales, inverse, BITS)
    return codes, scales


@triton.jit
def _quotient(m, v):
    """m in its units, and the units, which are powers of two."""
    if v is None:
        return m, m
    else:
        unit = _unit_bits(v)
        return m * float_of((254 << 23) - unit), float_of(unit)


@triton.jit
def _normalized_codes(q, scales, inverse, BITS: tl.constexpr):
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
        return codes, _number4(codes) * scales


@triton.jit
def _number4(codes):
    """Exponent and fraction where a float has them; its own exponent is 126 larger."""
    return float_of(((codes & 7) << 22) | ((codes & 8) << 28)) * 2.0**126


# log_signed: a first moment by itself, in logarithmic codes with a sign.


@triton.jit
def log_signed_decode(codes, foot, top):
    lo, span = _ends(foot, top)
    step = exact_quotient(tl.maximum(span, 1.0), 127.0)
    return _log_value(codes & 127, codes << 24, lo, tl.where(span > 0, step, 0.0), foot, top)


@triton.jit
def log_signed_encode(x):
    magnitude = tl.abs(x)
    infinite = magnitude == float("inf")
    magnitude = tl.where(magnitude >= TINY, magnitude, 0.0)
    finite = tl.where(infinite, 0.0, magnitude)
    top = float_of(column_max(bits_of(finite)))
    top = tl.where((top == 0) & (column_max(infinite.to(tl.int32)) > 0), LARGEST, top)
    magnitude = tl.where(infinite, top, magnitude)
    least = float_of(column_min(bits_of(tl.where(finite > 0, finite, LARGEST))))
    foot = tl.minimum(tl.maximum(least * 8.0, top * 2.0**-24), top * 2.0)
    foot = tl.minimum(tl.maximum(foot, TINY), LARGEST)
    foot = tl.where(top > 0, float_of(bits_of(foot) & INFINITY), 0.0)
    lo, span = _ends(foot, top)
    rate = tl.where(span > 0, tl.div_rn(127.0 * 65536, tl.where(span > 0, span, 1.0)), 0.0)
    above = tl.maximum(bits_of(magnitude + foot) - lo, 0).to(tl.float32)
    k = tl.minimum(((above * rate).to(tl.int32) + 32768) >> 16, 127)
    k = tl.where(magnitude > 0, tl.where(magnitude == top, 127, k), 0)
    return tl.where((x < 0) & (k > 0), k + 128, k), foot, top


@triton.jit
def fast_log_signed_encode(x, BITS: tl.constexpr, PACKED: tl.constexpr):
    magnitude = tl.abs(x)
    peak = column_peak(x)
    # Zeros do not count: minus 1, they are the largest unsigned number.
    least = column_min((bits_of(magnitude) - 1).to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True) + 1
    top = float_of(peak)
    foot = tl.minimum(tl.maximum(float_of(least) * 8.0, top * 2.0**-24), top * 2.0)
    foot = float_of(bits_of(tl.minimum(tl.maximum(foot, TINY), LARGEST)) & INFINITY)
    foot = tl.where(peak == 0, 0.0, foot)
    lo, span = _ends(foot, top)
    above = (bits_of(magnitude + foot) - lo).to(tl.float32)
    k = ((above * exact_ratio(127.0 * 65536, tl.where(peak == 0, 1.0, span))).to(tl.int32) + 32768) >> 16
    lost = x - _log_value(k, bits_of(x), lo, exact_quotient(span, 127.0), foot, top)
    unusual = (peak >= INFINITY) | ((peak > 0) & ((peak < SMALLEST) | (least < SMALLEST)))
    # -k is negative where k is not zero.
    return as_words(k | (((bits_of(x) & -k) >> 24) & 128), BITS, PACKED), foot, top, lost, unusual


@triton.jit
def _ends(foot, top):
    """The pattern of c, and how far that of the largest element lies above it."""
    lo = bits_of(foot)
    return lo, (bits_of(top + foot) - lo).to(tl.float32)


@triton.jit
def _log_value(k, sign, lo, step, foot, top):
    """What k stands for, with the sign bit of `sign`."""
    index = nearest(k.to(tl.float32) * step)
    value = tl.where(k == 127, top, float_of(lo + index) - foot)
    return float_of(bits_of(value) | (sign & -0x80000000))
