# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Float8 weights on a tile: e4m3 codes and int8 low words.

The specification is `narrowgauge.storage._float8_weight`, and `_codecs` says what the functions are called and
given. The bits of a code without its sign, and of its low word below, are those of a float32, whose exponent is 120
larger: a product with a power of two makes one of the other, also where e4m3 is subnormal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import ASSEMBLY, INFINITY, bits_of, float_of
from narrowgauge.kernels._step._packing import apart4, beside4, codes_of, from_codes, offsets_of

_UP = tl.constexpr(2.0**120)
_DOWN = tl.constexpr(2.0**-120)
_LARGEST = tl.constexpr(448 * 2.0**-120)
_PATTERN = tl.constexpr(-0x78001000)  # sign, code and low word among a float32's bits
_CODE = tl.constexpr(-0x78100000)  # sign and code
# Four codes and four low words: each code above its low word, whose highest bit is flipped.
BESIDE = tl.constexpr(
    "{ .reg .b32 t; xor.b32 t, $5, 0x80808080; prmt.b32 $0, t, $4, 0x4000; prmt.b32 $1, t, $4, 0x5111; "
    "prmt.b32 $2, t, $4, 0x6222; prmt.b32 $3, t, $4, 0x7333; }"
)
# The way back, from the two upper bytes.
APART = tl.constexpr(
    "{ .reg .b32 t, u, v; prmt.b32 t, $2, $3, 0x7362; prmt.b32 u, $4, $5, 0x7362; prmt.b32 $0, t, u, 0x7632; "
    "prmt.b32 v, t, u, 0x5410; xor.b32 $1, v, 0x80808080; }"
)
# Half a code, eight random bits, and half of what they leave.
UP = tl.constexpr("prmt.b32 $0, $1, 0x00800080, 0x5424;")


@triton.jit
def next_scale(largest, scale):
    octaves = -((118 - largest) >> 3)
    octaves = tl.where((largest == 0) | ((largest >= 102) & (largest <= 118)), 0, octaves)
    exponent = tl.minimum(tl.maximum((bits_of(scale) >> 23) - 127 + octaves, -32), 7)
    return float_of((exponent + 127) << 23)


@triton.jit
def inverse_of(scale):
    """The inverse of a scale, which is a power of two."""
    return float_of((254 << 23) - bits_of(scale))


@triton.jit
def fp8split8_read(p, low, scale, inverse, KIND: tl.constexpr):
    code, offset = p.to(tl.int32), low.to(tl.int32)
    bare = code & 0x7F
    offset = tl.where(bare == 0, tl.maximum(offset, 0), offset)
    sign = (code & 0x80) << 24
    magnitude = float_of((bare << 20) + (offset << 12)) * (_UP * scale)
    return float_of(tl.where(bare == 0x7F, 0x7FC00000, bits_of(magnitude)) | sign)


@triton.jit
def fp8split8_add(p, low, scale, inverse, weight, delta, random, KIND: tl.constexpr):
    updated = weight + delta
    odd = (bits_of(updated) & INFINITY) == INFINITY
    both = tl.where(odd, 0x800000, _rounded(tl.where(odd, 0.0, updated), inverse, random))
    code = tl.where(odd, 0x7F, (both >> 24) | ((bits_of(updated) >> 24) & 0x80))
    return code.to(tl.uint8), (both >> 16 ^ 0x80).to(tl.int8), both


@triton.jit
def fp8split8_moved(p, low, scale, inverse, p_new, low_new, weight, KIND: tl.constexpr):
    zero, new_scale = tl.full([], 0, tl.int8), inverse_of(inverse)
    stored = fp8split8_read(p_new, low_new, new_scale, inverse, KIND) - weight
    before = fp8split8_read(p, zero, scale, inverse, KIND)
    return stored, fp8split8_read(p_new, zero, new_scale, inverse, KIND) - before


@triton.jit
def fast_fp8split8_read(p, low, scale, inverse):
    return float_of((_beside(p, low) >> 4) & _PATTERN) * (_UP * scale)


@triton.jit
def fp8split8_read_unusual(p, low, scale, inverse):
    """Not zero where there is a NaN, or a low word below 0 beside the code 0."""
    if p.dtype == tl.int32:
        bare = p & 0x7F7F7F7F
        return ((bare + 0x01010101) | (~(bare + 0x7F7F7F7F) & low)) & -0x7F7F7F80
    else:
        bare = p.to(tl.int32) & 0x7F
        return ((bare + 1) | (~(bare + 0x7F) & low.to(tl.int32))) & 0x80


@triton.jit
def fast_fp8split8_add(p, low, scale, inverse, weight, delta, random):
    updated = weight + delta
    sizes = _rounded(updated, inverse, random)
    both = sizes | (bits_of(updated) & -0x80000000)
    if p.dtype != tl.int32:
        hi, lo = (both >> 24).to(tl.uint8), ((both >> 16) ^ 0x80).to(tl.int8)
    elif ASSEMBLY:
        a, b, c, d = apart4(both)
        hi, lo = tl.inline_asm_elementwise(
            APART, "=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        hi, lo = from_codes(both >> 24), from_codes((both >> 16) ^ 0x80)
    # How far all moved, and the code alone.
    back = _UP * inverse_of(inverse)
    stored = float_of(((both - 0x800000) >> 4) & _PATTERN) * back - weight
    before = float_of((codes_of(p) << 24 >> 4) & _CODE) * (_UP * scale)
    return hi, lo, stored, float_of((both >> 4) & _CODE) * back - before, updated, sizes


@triton.jit
def _beside(p, low):
    """Each code in the highest byte, its low word below."""
    if ASSEMBLY and p.dtype == tl.int32:
        a, b, c, d = tl.inline_asm_elementwise(
            BESIDE, "=r,=r,=r,=r,r,r", [p, low],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        return beside4(a, b, c, d) - 0x800000
    else:
        return (codes_of(p) << 24) + (offsets_of(low) << 8)


@triton.jit
def _rounded(x, inverse, random):
    """The code of a number in the highest byte, its low word below, by the lower eight of 16 random bits.

    Half a code is added too, which rounds to the code, and flips the highest bit of the low word.
    """
    magnitude = tl.minimum(tl.abs(x) * (inverse * _DOWN), _LARGEST)
    if ASSEMBLY:
        up = tl.inline_asm_elementwise(UP, "=r,r", [random], dtype=tl.int32, is_pure=True, pack=1)
    else:
        up = ((random >> 8) & 0xFF00 | 0x800080).to(tl.int32)
    return (bits_of(magnitude) << 4) + up
