# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Float32 numbers as bits, and roundings to narrower formats, the same compiled and in triton's interpreter.

Nothing is fused but what says so (`tl.fma`), and kernels are compiled that way: a product and the sum that follows
are one rounding or two in every kernel alike, whatever else it does. The interpreter rounds `tl.fma` twice. It
rounds to bf16 and fp8 in its own way: those two casts are written in integers for it.

Random bits of a tile are those of `narrowgauge.formats.random_bits` and `random_halves`, bit for bit. The ten
rounds of Philox give 128 bits, which serve eight elements by halves or four by words. A thread has eight
neighbors, so a block of Philox never leaves it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from narrowgauge.kernels._triton import instructions

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

# Where bytes are moved about, the compiler takes two or three instructions for one: those places are in assembly,
# beside the same in integers, which the interpreter runs, and GPUs that have no such instructions.
ASSEMBLY = tl.constexpr(not INTERPRETED.value and instructions()[0])
FLOAT8 = tl.constexpr(not INTERPRETED.value and instructions()[1])

UPPER = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")

INFINITY = tl.constexpr(0x7F800000)  # bits of float32's
SMALLEST = tl.constexpr(1 << 23)  # bits of the smallest normal float32
TINY = tl.constexpr(2.0**-126)
LARGEST = tl.constexpr(3.4028234663852886e38)
# Added to a number below 2^22, it rounds it to an integer, ties to even, in the sum's lowest bits.
ROUNDER = tl.constexpr(12582912.0)
# Philox's multipliers and key increments.
_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exact_reciprocal(x):
    """1 / x, rounded to nearest, for magnitudes from 2^-126 to 2^126.

    What the compiler makes of a division is the same, and a branch to what other numbers need.
    """
    if not ASSEMBLY:
        return tl.div_rn(1.0, x)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 r, e, n; rcp.approx.ftz.f32 r, $1; neg.f32 n, $1; fma.rn.f32 e, n, r, 0f3F800000; "
            "fma.rn.f32 $0, r, e, r; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def exact_ratio(x, y):
    """x / y, rounded to nearest, of numbers and quotients from 2^-60 to 2^60."""
    if not ASSEMBLY:
        return tl.div_rn(x, y)
    else:
        inverse = exact_reciprocal(y)
        quotient = x * inverse
        return tl.fma(tl.fma(quotient, -y, x), inverse, quotient)


@triton.jit
def exact_quotient(x, by: tl.constexpr):
    """x / by for 6, 127 and 448, rounded to nearest; x is from 2^-120 on.

    A product with the rounded reciprocal, corrected once by its remainder: right for every float32, all were
    tried.
    """
    if not ASSEMBLY:
        return tl.div_rn(x, by)
    else:
        inverse: tl.constexpr = 1.0 / by
        quotient = x * inverse
        return tl.fma(tl.fma(quotient, -by, x), inverse, quotient)


@triton.jit
def nearest(x):
    """The nearest integer to a number of at least 0, ties to even."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        # More than 2^22 leave no room for the sum with 1.5 2^23.
        whole = tl.floor(x)
        part = x - whole
        index = whole.to(tl.int32)
        return index + ((part > 0.5) | ((part == 0.5) & ((index & 1) == 1))).to(tl.int32)


@triton.jit
def root(x):
    """The square root, to an ulp; zero for numbers below 2^-126."""
    if not ASSEMBLY:
        return tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x to an ulp, for magnitudes from 2^-126 to 2^126; infinite below, zero above."""
    if not ASSEMBLY:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def widen(word, KIND: tl.constexpr):
    """The float32 number of a word as it was loaded: bits of bf16 and fp16, or float32 itself."""
    if KIND == "bf16":
        return float_of(upper(word))
    elif KIND == "fp16":
        return word.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return word


@triton.jit
def upper(word):
    """16 bits as the upper half of 32."""
    if not ASSEMBLY:
        return word.to(tl.int32) << 16
    else:
        return tl.inline_asm_elementwise(
            UPPER,
            "=r,=r,r", [word], dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """The word nearest to a float32 number, ties to even."""
    if KIND == "bf16":
        if INTERPRETED:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)
        else:
            return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif KIND == "fp16":
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return x


@triton.jit
def words_at(pointer, words):
    """Words as what a pointer is of: integers, or float8 and 16-bit floats of the same bits."""
    return words.to(pointer.dtype.element_ty, bitcast=True)


@triton.jit
def rounded_product(x, y):
    """x · y in float32, rounded before anything is added, even where a compiler may fuse the two."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * y


@triton.jit
def gather(table, index):
    """32 bits of a constant table for each index; none is negative.

    A load of triton's would be dealt out to threads in its own way, and the tile would go there and back.
    """
    if ASSEMBLY:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b64 at; mad.wide.u32 at, $1, 4, $2; ld.global.nc.b32 $0, [at]; }",
            "=r,r,l", [index, table.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = tl.load(table + index).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def to_e4m3(x):
    """Bits of the nearest float8 e4m3, ties to even; 448 at the most. x is a number."""
    if not FLOAT8:
        y = tl.minimum(tl.abs(x), 448.0)
        # Below 2^-6 codes are multiples of 2^-9; above, the bit pattern is rounded to three bits of fraction.
        small = bits_of(y * 512.0 + ROUNDER) & 0xFF
        bits = bits_of(y)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        code = tl.where(y < 2.0**-6, small, large)
        return (code | ((bits_of(x) >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code):
    """The number of a float8 e4m3 that is one."""
    if not FLOAT8:
        # Exponent and fraction where a float has them; its own exponent is 120 larger.
        bits = code.to(tl.int32)
        return float_of(((bits & 0x7F) << 20) | ((bits & 0x80) << 24)) * 2.0**120
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def column_max(x):
    return tl.max(x, 1, keep_dims=True)


@triton.jit
def column_min(x):
    return tl.min(x, 1, keep_dims=True)


@triton.jit
def column_peak(x):
    """The bits of the largest magnitude; of something above infinity if one is NaN."""
    if x.shape[1] < 256:
        return column_max(bits_of(x) & 0x7FFFFFFF)
    else:
        # Among eight neighbors, which a thread has, as floats: that takes the sign off on the way.
        some = tl.reduce(tl.abs(x).reshape([x.shape[0], x.shape[1] // 8, 8]), 2, _larger)
        return column_max(bits_of(some))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def without_sign(x):
    return float_of(bits_of(x) & 0x7FFFFFFF)


@triton.jit
def if_finite(x):
    """x, and zero for infinities and NaN."""
    return tl.where((bits_of(x) & INFINITY) == INFINITY, 0.0, x)


@triton.jit
def is_unknown(m, v):
    """Whether a second moment of zero is no unit for an element of the first, which is then kept as zero."""
    return ((bits_of(v) & INFINITY) == 0) & (tl.abs(m) >= 2.0**-58)


@triton.jit
def largest(x):
    """The largest integer of a tile: one number for the whole program, to branch on."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def any_of(test):
    """Whether a test of each block holds anywhere in a tile."""
    return largest(test.to(tl.int32)) > 0


@triton.jit
def tiny(bits, EXPONENT: tl.constexpr):
    """Whether a magnitude's bits are those of a number below 2^(EXPONENT - 127) other than zero."""
    return (bits - 1).to(tl.uint32, bitcast=True) < (EXPONENT << 23) - 1


@triton.jit
def not_finite(x):
    """Whether a tile has an infinity or NaN: one number for the whole program."""
    # A product runs in the float pipe; a comparison would load the busier integer pipe.
    return any_bits(bits_of(x * 0.0) & 0x7FFFFFFF)


@triton.jit
def any_bits(x):
    """Whether an integer of a tile is not zero: one number for the whole program."""
    return tl.reduce(tl.reduce(x, 1, _either), 0, _either) != 0


@triton.jit
def _either(a, b):
    return a | b


# Moments that are floats: `narrowgauge.storage._states`.


@triton.jit
def float32_decode(word):
    return word


@triton.jit
def float32_encode(x):
    return x


@triton.jit
def bfloat16_decode(word):
    return widen(word, "bf16")


@triton.jit
def bfloat16_encode(x):
    return narrow(x, "bf16")


@triton.jit
def expansion_decode(hi, lo):
    return widen(hi, "bf16") + widen(lo, "bf16")


@triton.jit
def expansion_encode(x):
    hi = narrow(x, "bf16")
    lo = x - widen(hi, "bf16")
    return hi, narrow(tl.where((hi.to(tl.int32) & 0x7F80) == 0x7F80, 0.0, lo), "bf16")


# Random bits.


@triton.jit
def _wide(a, b: tl.constexpr):
    """Both halves of a product, by one instruction."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$1, $0}, t; }",
            "=r,=r,r,r", [a, tl.full([], b, tl.uint32)], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = a.to(tl.uint64) * tl.full([], b, tl.uint64)
        return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(10):
        high0, low0 = _wide(c0, _M0)
        high1, low1 = _wide(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full([], _W0, tl.uint32)
        k1 += tl.full([], _W1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _words(first, number, seed, stream, PURPOSE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Four words of each of ROWS x COUNT blocks of Philox from block `first` on: (ROWS, 4 COUNT), in order."""
    block = tl.arange(0, ROWS)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    # The upper half of the counter is the same in all of a tile that begins at a multiple of its size. Of a shared
    # parameter one tile may have element 2^34 (2^35 of halves) inside: what follows in it gets other bits.
    c0 = first.to(tl.uint32) + block.to(tl.uint32)
    c1 = (first >> 32).to(tl.uint32)
    c2 = number.to(tl.uint32)
    c3 = tl.full([], PURPOSE, tl.uint32)
    a, b, c, d = _philox(c0, c1, c2, c3, seed.to(tl.uint32), stream.to(tl.uint32))
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape([ROWS, 4 * COUNT])


@triton.jit
def random_words(start, number, seed, stream, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """32 random bits for each element of a tile that begins at element `start`, a multiple of its size."""
    return _words(start // 4, number, seed, stream, 0, ROWS, SIZE // 4)


@triton.jit
def random_halves(start, number, seed, stream, PURPOSE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """16 random bits for each element of a tile, in the upper half of 32."""
    words = _words(start // 8, number, seed, stream, PURPOSE, ROWS, SIZE // 8)
    return tl.join(words << 16, words & 0xFFFF0000).reshape([ROWS, SIZE])
