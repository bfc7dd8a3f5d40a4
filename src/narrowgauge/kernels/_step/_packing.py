# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Narrow words as they travel: two or four in one of 32 bits.

Kept one by one, bytes that wait in registers take a register each, and are packed and unpacked at every turn. So
whole tiles go by words of 32 bits, (rows, elements / 2) or (rows, elements / 4), and elements come out of them
beside one another in the same thread. Where the compiler would take two instructions for one the code is assembly,
beside the same in integers, which the interpreter runs.

Tiles at the end of a tensor, or at odd addresses, have their words one by one. Functions that take words take them
either way; those that make them have an argument that says which.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import ASSEMBLY, FLOAT8, UPPER, float_of, from_e4m3, narrow, to_e4m3, upper

BYTES = tl.constexpr(
    "prmt.b32 $0, $4, 0, 0x4440; prmt.b32 $1, $4, 0, 0x4441; prmt.b32 $2, $4, 0, 0x4442; "
    "prmt.b32 $3, $4, 0, 0x4443;"
)
OFFSETS = tl.constexpr(
    "prmt.b32 $0, $4, 0, 0x8804; prmt.b32 $1, $4, 0, 0x9914; prmt.b32 $2, $4, 0, 0xAA24; "
    "prmt.b32 $3, $4, 0, 0xBB34;"
)
NUMBERS = tl.constexpr(
    "{ .reg .b32 t; xor.b32 t, $4, 0x80808080; prmt.b32 $0, t, 0x4B000000, 0x7650; "
    "prmt.b32 $1, t, 0x4B000000, 0x7651; prmt.b32 $2, t, 0x4B000000, 0x7652; "
    "prmt.b32 $3, t, 0x4B000000, 0x7653; }"
)
PACK = tl.constexpr(
    "{ .reg .b32 t, u; prmt.b32 t, $1, $2, 0x0040; prmt.b32 u, $3, $4, 0x0040; prmt.b32 $0, t, u, 0x5410; }"
)
PACK_UPPER = tl.constexpr(
    "{ .reg .b32 t, u; prmt.b32 t, $1, $2, 0x0062; prmt.b32 u, $3, $4, 0x0062; prmt.b32 $0, t, u, 0x5410; }"
)
CUT = tl.constexpr(
    "{ .reg .b32 a, b, c, d, u, v; add.s32 a, $3, 0x8080; add.s32 b, $4, 0x8080; add.s32 c, $5, 0x8080; "
    "add.s32 d, $6, 0x8080; prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632; "
    "prmt.b32 u, a, b, 0x0051; prmt.b32 v, c, d, 0x0051; prmt.b32 u, u, v, 0x5410; "
    "xor.b32 $2, u, 0x80808080; }"
)
_FROM_FLOAT8 = tl.constexpr(
    "{ .reg .b16 l, h; .reg .b32 t, u; mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 t, l; cvt.rn.f16x2.e4m3x2 u, h; "
    "mov.b32 {l, h}, t; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; "
    "mov.b32 {l, h}, u; cvt.f32.f16 $2, l; cvt.f32.f16 $3, h; }"
)
_TO_FLOAT8 = tl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
    "mov.b32 $0, {l, h}; }"
)


@triton.jit
def beside2(a, b):
    """Elements a, b, a, b, ... of words that hold two."""
    return tl.join(a, b).reshape([a.shape[0], 2 * a.shape[1]])


@triton.jit
def beside4(a, b, c, d):
    """Elements a, b, c, d, a, ... of words that hold four."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape([a.shape[0], 4 * a.shape[1]])


@triton.jit
def apart2(x):
    return tl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def apart4(x):
    first, second = tl.split(x.reshape([x.shape[0], x.shape[1] // 4, 2, 2]))
    a, c = tl.split(first)
    b, d = tl.split(second)
    return a, b, c, d


# bf16 words: two in 32 bits, or 16 bits each.


@triton.jit
def uppers(words):
    """bf16 words, each as the upper half of 32 bits."""
    if words.dtype != tl.int32:
        return upper(words)
    elif ASSEMBLY:
        a, b = tl.inline_asm_elementwise(
            UPPER, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        return beside2(a, b)
    else:
        return beside2(words << 16, words & -0x10000)


@triton.jit
def halves_of(words):
    """bf16 words one by one."""
    if words.dtype != tl.int32:
        return words
    else:
        return (uppers(words) >> 16).to(tl.int16)


@triton.jit
def from_uppers(x):
    """Pairs of the upper halves of 32 bits."""
    a, b = apart2(x)
    return ((a >> 16) & 0xFFFF) | (b & -0x10000)


@triton.jit
def bf16_as(x, words):
    """The nearest bf16, ties to even, in pairs where other words are."""
    if words.dtype != tl.int32:
        return narrow(x, "bf16")
    elif ASSEMBLY:
        a, b = apart2(x)
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return from_uppers(narrow(x, "bf16").to(tl.int32) << 16)


@triton.jit
def beyond_half(p, low):
    """Not zero where a bf16 low word is more than half a unit in the last place of its bf16.

    That half is the bf16 without sign and fraction, eight binades lower. A negative difference sets the highest
    bit, that of each half where two share 32 bits.
    """
    if p.dtype == tl.int32:
        return ((p & 0x7F807F80) - 0x04000400 - (low & 0x7FFF7FFF)) & -0x7FFF8000
    else:
        return ((p.to(tl.int32) & 0x7F80) - 0x0400 - (low.to(tl.int32) & 0x7FFF)) & -0x8000


# Bytes: four in 32 bits, or 8 bits each.


@triton.jit
def codes_of(words, BITS: tl.constexpr = 8):
    """Codes as integers; those of 4 bits are two a byte, the first in its lower half."""
    if words.dtype != tl.int32:
        codes = words.to(tl.int32)
    elif ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            BYTES, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        codes = beside4(a, b, c, d)
    else:
        codes = beside4(words & 0xFF, (words >> 8) & 0xFF, (words >> 16) & 0xFF, (words >> 24) & 0xFF)
    if BITS == 4:
        return beside2(codes & 0xF, codes >> 4)
    else:
        return codes


@triton.jit
def from_codes(codes):
    """Integers of 32 bits, of the lowest bytes of four codes each."""
    a, b, c, d = apart4(codes)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(PACK, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | (d << 24)


@triton.jit
def as_words(codes, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Codes as they are in memory; four bytes in 32 bits where they are PACKED."""
    if BITS == 4:
        first, second = apart2(codes)
        codes = first | (second << 4)
    if PACKED:
        return from_codes(codes)
    else:
        return codes.to(tl.uint8)


@triton.jit
def uppers_as_words(codes, BITS: tl.constexpr, PACKED: tl.constexpr):
    """The same of codes in the upper halves of 32 bits."""
    if ASSEMBLY and PACKED and BITS == 8:
        a, b, c, d = apart4(codes)
        return tl.inline_asm_elementwise(
            PACK_UPPER, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return as_words(codes >> 16, BITS, PACKED)


@triton.jit
def zeros_in(words):
    """A number other than zero where a byte is zero: of four in 32 bits, where taking one off borrows."""
    if words.dtype == tl.int32:
        return (words - 0x01010101) & ~words & -0x7F7F7F80
    else:
        return (words == 0).to(tl.int32)


@triton.jit
def offsets_of(words):
    """Bytes in two's complement, 256 times."""
    if words.dtype != tl.int32:
        return words.to(tl.int32) << 8
    elif ASSEMBLY:
        # The byte second, its sign in the two above.
        a, b, c, d = tl.inline_asm_elementwise(
            OFFSETS,
            "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        return beside4(a, b, c, d)
    else:
        return beside4((words << 24) >> 16, (words << 16) >> 24 << 8, (words << 8) >> 24 << 8, words >> 24 << 8)


@triton.jit
def flipped_nibbles(words):
    """Words of 4 bits with their highest bits flipped, each in bits 12 to 15; other bits are anything."""
    if words.dtype != tl.int32:
        pairs = words.to(tl.int32) ^ 0x88
        return beside2(pairs << 12, pairs << 8)
    else:
        w = words ^ -0x77777778
        even = beside4(w << 12, w << 4, w >> 4, w >> 12)
        return beside2(even, beside4(w << 8, w, w >> 8, w >> 16))


@triton.jit
def from_flipped_nibbles(bits, like):
    """What `flipped_nibbles` reads, from bits 12 to 15 of each; eight in 32 bits where `like` has them so."""
    first, second = apart2(bits)
    pairs = ((first >> 12) & 0xF) | ((second >> 8) & 0xF0)
    if like.dtype == tl.int32:
        return from_codes(pairs) ^ -0x77777778
    else:
        return (pairs ^ 0x88).to(tl.uint8)


@triton.jit
def numbers_of(words):
    """Bytes in two's complement as floats.

    No conversion, which would be four times slower: they are the lowest bits of 2^23 and something.
    """
    if ASSEMBLY and words.dtype == tl.int32:
        a, b, c, d = tl.inline_asm_elementwise(
            NUMBERS, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        return float_of(beside4(a, b, c, d)) - 8388736.0
    else:
        return float_of((codes_of(words) ^ 0x80) | 0x4B000000) - 8388736.0


@triton.jit
def cut_words(bits):
    """bf16 words and int8 low words of finite float32s' bits: rounded at 2^7 and again at 2^15.

    With 0x8080 added, the upper two bytes are the bf16, the next is the low word, its highest bit flipped.
    """
    if ASSEMBLY:
        a, b, c, d = apart4(bits)
        hi, more, low = tl.inline_asm_elementwise(
            CUT, "=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        return beside2(hi, more), low
    else:
        both = bits + 0x8080
        return from_uppers(both), from_codes((both >> 8) ^ 0x80)


@triton.jit
def float8_of(words):
    """The numbers of float8 e4m3."""
    if FLOAT8 and words.dtype == tl.int32:
        a, b, c, d = tl.inline_asm_elementwise(
            _FROM_FLOAT8,
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return beside4(a, b, c, d)
    elif words.dtype == tl.int32:
        return from_e4m3(codes_of(words))
    else:
        return from_e4m3(words)


@triton.jit
def float8_as_words(x, PACKED: tl.constexpr):
    """The nearest float8 e4m3, ties to even, 448 at the most."""
    if FLOAT8 and PACKED:
        a, b, c, d = apart4(x)
        return tl.inline_asm_elementwise(
            _TO_FLOAT8, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    elif PACKED:
        return from_codes(to_e4m3(x).to(tl.int32))
    else:
        return to_e4m3(x)
