# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Moments on a tile (blocks, elements of a block): decoded, and encoded again.

The specification is `narrowgauge.storage._states`, bit for bit. Codes are bytes here; those of 4 bits are packed
and unpacked by `pack` and `unpack`. What a block keeps besides is a column (blocks, 1).

Almost every block is an ordinary one: its elements are finite, and far enough from float32's ends that nothing
under- or overflows. What the others need is behind a branch that a whole program takes or not. The largest element
is found among integers, which a warp reduces by one instruction; as unsigned numbers, bits of what is negative,
infinite or no number lie above those of all that is ordinary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    INFINITY,
    ROUNDER,
    SMALLEST,
    TINY,
    any_of,
    bits_of,
    byte_number,
    exact_quotient,
    exact_reciprocal,
    float_of,
    product,
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
def unpack(codes, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Codes of 4 bits, two a byte, the first in its lower half."""
    return tl.join(codes & 0xF, codes >> 4).reshape([ROWS, SIZE])


@triton.jit
def pack(codes, ROWS: tl.constexpr, SIZE: tl.constexpr):
    first, second = tl.split(codes.reshape([ROWS, SIZE // 2, 2]))
    return first | (second << 4)


# Second moments of log8 and log4: `storage._pattern_codes`.


@triton.jit
def pattern_decode(codes, ranges):
    base, step = _base_and_step(ranges)
    k = codes.to(tl.int32)
    return float_of(tl.where(k > 0, k * step + (base - step), 0))


@triton.jit
def pattern_encode(x, random, BITS: tl.constexpr):
    """(codes, ranges, what they stand for), rounded by random bits in the upper halves of 32."""
    bits = bits_of(x)
    hi, lo = column_max(bits), column_min(bits)
    span: tl.constexpr = (63 if BITS == 8 else 48) << 23
    # In the topmost binades a code might stand for more than float32's largest number.
    unusual = (lo < SMALLEST) | (hi >= _HIGH) | (hi - lo > span)
    if any_of(unusual):
        codes, ranges, kept = _pattern_encode(bits, random, BITS)
    else:
        ranges = _range(lo, hi, BITS)
        base, step = _base_and_step(ranges)
        codes, kept = _pattern_codes(bits, base, step, ranges, random, BITS)
    return codes.to(tl.uint8), ranges, float_of(kept)


@triton.jit
def _pattern_codes(bits, base, step, ranges, random, BITS: tl.constexpr):
    shift = (ranges >> 7) & 31
    if BITS == 8:
        more = (random >> (32 - shift).to(tl.uint32)).to(tl.int32)
        codes = (bits + (step - base) + more) >> shift
    else:
        more = ((random >> 16).to(tl.uint64) * step.to(tl.uint64) >> 16).to(tl.int32)
        # In 128ths of the step's power of two: twelve bits, whose quotient a product of 20 more gives exactly.
        parts = 128 + (ranges & 127)
        over = ((1 << 20) + parts - 1) // parts
        codes = ((bits + (step - base) + more) >> (shift - 7)) * over >> 20
    return codes, codes * step + (base - step)


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
    ranges = tl.where(hi > 0, _range(lo, hi, BITS), 0)
    base, step = _base_and_step(ranges)
    # A block of zeros has a step of 2^7 / 2^7: its codes are masked, whatever they are.
    safe = tl.where(hi > 0, ranges, 12 * 128)
    clamped = tl.where(wild, hi, tl.maximum(bits, lo))
    codes, _ = _pattern_codes(clamped, base, step, safe, random, BITS)
    codes = tl.minimum(codes, (INFINITY - 1 - base) // tl.maximum(step, 1) + 1)
    codes = tl.where((there | wild) & (hi > 0), codes, 0)
    return codes, ranges, tl.where(codes > 0, codes * step + (base - step), 0)


@triton.jit
def _base_and_step(ranges):
    return ranges & ~0xFFF, (128 + (ranges & 127)) << tl.maximum(((ranges >> 7) & 31) - 7, 0)


@triton.jit
def _range(lo, hi, BITS: tl.constexpr):
    if BITS == 8:
        s = tl.maximum(_bit_length((hi - lo) >> 8), 12)
        s += (((hi + (1 << s) - 1) >> s) - (lo >> s) > 254).to(tl.int32)
        return ((lo >> s) << s) + 128 * s
    else:
        base = lo & ~0xFFF
        least = (hi - base + 13) // 14
        s = tl.maximum(_bit_length(least >> 8), 5) + 7
        parts = (least + (1 << (s - 7)) - 1) >> (s - 7)
        over = parts == 256
        return base + 128 * tl.where(over, s + 1, s) + tl.where(over, 128, tl.maximum(parts, 128)) - 128


@triton.jit
def _bit_length(x):
    return tl.maximum((bits_of(x.to(tl.float32)) >> 23) - 126, 0)


# First moments of log8 and log4: `storage._relative_codes`.


@triton.jit
def unit_bits(v):
    """Bits of the unit, a power of two, for each element of a second moment."""
    return ((bits_of(v) >> 1) + (127 << 22)) & (255 << 23)


@triton.jit
def relative_decode(codes, scales, v, BITS: tl.constexpr):
    """The moment; v is the second moment as it was kept beside it, or None."""
    quotient = _number(codes, BITS) * scales
    return quotient if v is None else quotient * float_of(unit_bits(v))


@triton.jit
def relative_encode(m, v, BITS: tl.constexpr):
    """(codes, scales, what is lost of m); v is the second moment as it is kept now, or None."""
    if v is None:
        q = m
    else:
        unit = unit_bits(v)
        q = m * float_of((254 << 23) - unit)
    outermost: tl.constexpr = 127.0 if BITS == 8 else 6.0
    top = column_max(bits_of(q) & 0x7FFFFFFF)
    # 127 times the smallest scale lies below 2^-119. Units are at most 2^64: below 2^60 nothing overflows.
    unusual = (top < (8 << 23)) | (top >= (187 << 23))
    if any_of(unusual):
        q = tl.where((bits_of(q) & INFINITY) == INFINITY, 0.0, q)
        scales = tl.div_rn(float_of(column_max(bits_of(q) & 0x7FFFFFFF)), outermost)
        scales = tl.where(scales >= TINY, scales, 0.0)
        inverse = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
        codes, kept = _relative_codes(q, scales, inverse, BITS)
        lost = m - (kept if v is None else kept * float_of(unit))
        lost = tl.where((bits_of(lost) & INFINITY) == INFINITY, 0.0, lost)
    else:
        scales = exact_quotient(float_of(top), outermost)
        codes, kept = _relative_codes(q, scales, exact_reciprocal(scales), BITS)
        lost = m - (kept if v is None else kept * float_of(unit))
    return codes, scales, lost


@triton.jit
def _relative_codes(q, scales, inverse, BITS: tl.constexpr):
    """Codes, and what they stand for before the unit."""
    if BITS == 8:
        rounded = product(q, inverse) + ROUNDER
        return bits_of(rounded).to(tl.uint8), product(rounded - ROUNDER, scales)
    else:
        y = product(q, inverse)
        z = tl.abs(y)
        # From 1 on these are the floats with one bit of fraction; less than half of its unit never carries.
        k = tl.where(z > 0.75, 2, tl.where(z > 0.25, 1, 0))
        k = tl.where(z > 1.0, ((bits_of(z) + 0x1FFFFF) >> 22) - 252, k)
        codes = tl.where((y < 0) & (k > 0), k + 8, k).to(tl.uint8)
        return codes, product(_number(codes, BITS), scales)


@triton.jit
def _number(codes, BITS: tl.constexpr):
    if BITS == 8:
        return byte_number(codes)
    else:
        # Exponent and fraction where a float has them; its own exponent is 126 larger.
        k = codes.to(tl.int32)
        return float_of(((k & 7) << 22) | ((k & 8) << 28)) * 2.0**126
