# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Codes of a tile and the scales that go with them: the arithmetic of `narrowgauge.linear.quantize`, bit for bit.

Magnitudes are compared as integers: the bits of a float32 without its sign order as the number does, with infinity
above all numbers and NaN above infinity. So one maximum finds the absmax and what is not finite.

A product is rounded before it is a code, also where a compiler fuses products into sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    ASSEMBLY,
    FLOAT8,
    INTERPRETED,
    ROUNDER,
    bits_of,
    rounded_product,
    to_e4m3,
)

LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
_EXPONENT = tl.constexpr(1 << 23)
SMALLEST = tl.constexpr(2.0**-110)  # the smallest absmax that does not count as zero


@triton.jit
def magnitude(x, FORMAT: tl.constexpr):
    """An integer that orders as |x| does; in float8 with what is not finite below all else. See `absmax_of`."""
    bits = bits_of(x) & 0x7FFFFFFF
    if FORMAT == "int8":
        return bits
    else:
        # One exponent more: infinity and NaN overflow into negative numbers. Adding and taking the larger are one
        # instruction.
        return bits + _EXPONENT


@triton.jit
def absmax_of(largest, FORMAT: tl.constexpr):
    """The bits of the absmax, from the largest of the integers of `magnitude`, or 0 where there are none."""
    if FORMAT == "int8":
        return largest
    else:
        return tl.maximum(largest, _EXPONENT) - _EXPONENT


@triton.jit
def scales(own, absmax, FORMAT: tl.constexpr, LARGEST: tl.constexpr):
    """What elements are multiplied by, and what a code of 1 stands for.

    `own` is the absmax of the elements, `absmax` the one to use: float32 both, of one shape.
    """
    usable = (absmax >= SMALLEST) & (own < float("inf"))
    divisor = tl.where(usable, absmax, 1.0)
    largest = tl.full(divisor.shape, LARGEST, tl.float32)
    inverse = tl.where(usable, tl.div_rn(largest, divisor), 0.0)
    scale = tl.where(usable, tl.div_rn(divisor, largest), 0.0)
    if FORMAT == "int8":
        scale = tl.where(own < float("inf"), scale, float("nan"))
    return inverse, scale


@triton.jit
def encode(x, inverse, FORMAT: tl.constexpr, LARGEST: tl.constexpr, SATURATE: tl.constexpr):
    """8-bit codes, int8 or the bits of a float8 in uint8. SATURATE where the absmax was not x's own."""
    if FORMAT == "int8":
        # Where the inverse is zero x may be infinite.
        scaled = tl.where(inverse > 0.0, rounded_product(x, inverse), 0.0)
    else:
        # Joined with the zero that is added, a product is rounded as without it.
        scaled = x * inverse
    if SATURATE:
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if FORMAT == "int8":
        return bits_of(scaled + ROUNDER).to(tl.int8)
    else:
        # Adds a zero of x's sign to what is finite, and makes NaN of the rest.
        return _float8(tl.fma(x, tl.full(x.shape, 0.0, tl.float32), scaled), FORMAT)


@triton.jit
def _float8(x, FORMAT: tl.constexpr):
    if ASSEMBLY and FLOAT8:
        # Four codes a register. In pairs, as the compiler makes them, what CUDA 12.8's assembler made for codes in
        # both orders read registers before they were written (float32, sm_90).
        PAIR: tl.constexpr = "cvt.rn.satfinite." + FORMAT + "x2.f32"
        TEXT: tl.constexpr = PAIR + " low, $2, $1; " + PAIR + " high, $4, $3; mov.b32 $0, {low, high}; }"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; " + TEXT, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    if FORMAT == "e4m3":
        code = to_e4m3(x)
    else:
        code = _to_e5m2(x)
    if INTERPRETED:
        # What the GPU's conversion does of itself.
        code = tl.where(x == x, code, 0x7F).to(tl.uint8)
    return code


@triton.jit
def _to_e5m2(x):
    """Bits of the nearest float8 e5m2, ties to even; 57344 at the most."""
    if INTERPRETED:
        y = tl.minimum(tl.abs(x), 57344.0)
        # Below 2^-14 codes are multiples of 2^-16; above, the bit pattern is rounded to two bits of fraction.
        small = bits_of(y * 65536.0 + ROUNDER) & 0xFF
        bits = bits_of(y)
        large = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
        code = tl.where(y < 2.0**-14, small, large)
        return (code | ((bits_of(x) >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def tile_maximum(bits):
    """The largest of a tile, one number."""
    return tl.max(tl.max(bits, 1), 0)
