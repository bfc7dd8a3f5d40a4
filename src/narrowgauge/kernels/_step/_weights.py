# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Weights on a tile: what the rule sees of the stored words, and the words after its update.

The specification is `narrowgauge.storage._weights`, a storage a name. Words come and go as they lie in memory: bf16
and fp16 as int16 bits (`KIND`), low words in their own dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import ASSEMBLY, INFINITY, bits_of, float_of, narrow, upper, widen

OFFSET = tl.constexpr(
    "prmt.b32 $0, $4, 0, 0x8804; prmt.b32 $1, $4, 0, 0x9914; prmt.b32 $2, $4, 0, 0xAA24; "
    "prmt.b32 $3, $4, 0, 0xBB34;"
)
CUT = tl.constexpr(
    "{ .reg .b32 a, b, c, d, u, v; add.s32 a, $3, 0x8080; add.s32 b, $4, 0x8080; add.s32 c, $5, 0x8080; "
    "add.s32 d, $6, 0x8080; prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632; "
    "prmt.b32 u, a, b, 0x0051; prmt.b32 v, c, d, 0x0051; prmt.b32 u, u, v, 0x5410; "
    "xor.b32 $2, u, 0x80808080; }"
)


@triton.jit
def read_weight(p, low, STORAGE: tl.constexpr, KIND: tl.constexpr):
    """The float32 weight."""
    if STORAGE == "split":
        return _join(p, low, 0)
    elif STORAGE == "split8":
        return _join(p, low, 8)
    elif STORAGE == "expansion":
        return widen(p, KIND) + _bounded(p, low, KIND)
    elif STORAGE == "master":
        # A master copy that is no longer what the parameter rounds from was left behind: the parameter counts.
        seen = widen(p, KIND)
        return tl.where(widen(narrow(low, KIND), KIND) == seen, low, seen)
    else:
        return widen(p, KIND)


@triton.jit
def write_weight(p, low, weight, delta, random, STORAGE: tl.constexpr, KIND: tl.constexpr):
    """(parameter, low word) after the update; where there is no low word, the parameter twice."""
    if STORAGE == "split":
        return _cut(weight + delta, 0)
    elif STORAGE == "split8":
        return _cut(weight + delta, 8)
    elif STORAGE == "stochastic":
        hi = _stochastic(weight + delta, random, KIND)
        return hi, hi
    elif STORAGE == "kahan":
        owed = delta + _bounded(p, low, KIND)
        hi = narrow(weight + owed, KIND)
        return hi, _remainder(owed - (widen(hi, KIND) - weight), hi, KIND)
    elif STORAGE == "expansion":
        updated = weight + delta
        hi = narrow(updated, KIND)
        return hi, _remainder(updated - widen(hi, KIND), hi, KIND)
    elif STORAGE == "master":
        updated = weight + delta
        return narrow(updated, KIND), updated
    else:
        hi = narrow(weight + delta, KIND)
        return hi, hi


@triton.jit
def usual_join(p, low, SHIFT: tl.constexpr):
    """The weight of a split one, and a number that is no less than infinity's bits where `_join` is needed.

    Rare: a borrow below zero, which changes the sign; and infinity and NaN, which keep their exponent. Without the
    sign that it should have, either is no less than infinity as an unsigned number.
    """
    bits = upper(p)
    joined = bits + _offset(low, SHIFT)
    return float_of(joined), (joined ^ (bits & -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _join(p, low, SHIFT: tl.constexpr):
    bits = upper(p)
    offset = _offset(low, SHIFT)
    magnitude = bits & 0x7FFFFFFF
    offset = tl.where(magnitude == 0, tl.maximum(offset, 0), offset)
    offset = tl.where(magnitude == INFINITY, tl.minimum(offset, 0), offset)
    return float_of(bits + tl.where(magnitude > INFINITY, 0, offset))


@triton.jit
def _offset(low, SHIFT: tl.constexpr):
    """A low word as a number of units in a float32's last place."""
    if ASSEMBLY and SHIFT == 8:
        # The byte second, its sign in the two above.
        return tl.inline_asm_elementwise(
            OFFSET,
            "=r,=r,=r,=r,r", [low], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return low.to(tl.int32) << SHIFT


@triton.jit
def _cut_bytes(bits):
    """(bf16 word, int8 low word) of a finite float32's bits: rounded at 2^7 and again at 2^15.

    With both halves added, the upper two bytes are the one, and the next is the other but for its highest bit.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            CUT,
            "=r,=r,=r,r,r,r,r", [bits], dtype=(tl.int16, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        both = bits + 0x8080
        return (both >> 16).to(tl.int16), (both >> 8).to(tl.int8) ^ -128


@triton.jit
def usual_cut(weight, SHIFT: tl.constexpr):
    """(parameter, low word) of a split weight, and a number as that of `usual_join` where `_cut` is needed."""
    # Of a number in sign and magnitude the lowest bits do not know the sign: no need to take it off.
    bits = bits_of(weight)
    if SHIFT == 8:
        hi, low = _cut_bytes(bits)
    else:
        hi, low = ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)
    return hi, low, (bits & 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _cut(weight, SHIFT: tl.constexpr):
    hi, low, magnitude = usual_cut(weight, SHIFT)
    odd = magnitude >= INFINITY
    return tl.where(odd, narrow(weight, "bf16"), hi), tl.where(odd, 0, low).to(low.dtype)


@triton.jit
def _half_ulp(p, KIND: tl.constexpr):
    """Half a unit in the last place of a parameter, as float32; zero where it is not finite."""
    if KIND == "bf16":
        exponent = (p.to(tl.int32) >> 7) & 0xFF
        exponent = tl.maximum(exponent, 1)
        # Below the normal numbers a power of two is a bit of the fraction. 2^-134 is none of bf16.
        bits = tl.where(exponent > 8, (exponent - 8) << 23, 1 << (tl.minimum(exponent, 8) + 14))
        bits = tl.where(exponent == 1, 0, bits)
        return tl.where(exponent == 0xFF, 0.0, float_of(bits))
    else:
        exponent = tl.maximum((p.to(tl.int32) >> 10) & 0x1F, 1)
        # 2^(exponent - 15 - 10 - 1), and 2^-25 is none of fp16.
        half = float_of((exponent + 127 - 26) << 23)
        return tl.where((exponent == 1) | (exponent == 0x1F), 0.0, half)


@triton.jit
def _bounded(p, low, KIND: tl.constexpr):
    half = _half_ulp(p, KIND)
    x = widen(low, KIND)
    bounded = tl.minimum(tl.maximum(x, -half), half)
    return tl.where(x != x, x, bounded)


@triton.jit
def _remainder(x, hi, KIND: tl.constexpr):
    """The low word, zero beside what is not finite."""
    top: tl.constexpr = 0x7F80 if KIND == "bf16" else 0x7C00
    return tl.where((hi.to(tl.int32) & top) == top, 0, narrow(x, KIND)).to(tl.int16)


@triton.jit
def _stochastic(x, random, KIND: tl.constexpr):
    """x rounded up where the random bits lie below the share of the gap that it has covered."""
    if KIND == "bf16":
        # Adding 2^16 - 1 - r carries just where r < the lower half.
        bits = bits_of(x)
        up = (bits + (0xFFFF - (random >> 16).to(tl.int32))) >> 16
        return tl.where(x != x, 0x7FC0, up).to(tl.int16)
    else:
        exponent = tl.maximum((bits_of(x) >> 23) & 0xFF, 127 - 14)
        exponent = tl.minimum(exponent, 127 + 16)
        steps = tl.abs(x) * float_of((2 * 127 + 10 - exponent) << 23)
        floor = tl.floor(steps)
        uniform = (random >> 8).to(tl.float32) * 2.0**-24
        whole = floor + tl.where(uniform < steps - floor, 1.0, 0.0)
        magnitude = whole * float_of((exponent - 10) << 23)
        magnitude = tl.where(magnitude > 65504.0, float("inf"), magnitude)
        return narrow(tl.where(x < 0, -magnitude, tl.where(x != x, x, magnitude)), KIND)
