# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Weights on a tile: what the rule sees of the stored words, and the words after its update.

The specification is `narrowgauge.storage._weights`, and `_codecs` says what the functions of a storage are called
and given. Words come and go as they are in memory: bf16 and fp16 as bits (`KIND`), low words in their own dtype.
Where there is no low word, `low` is the parameter. Low words of 4 bits come and go as codes, one an element; fast
functions have them as they are in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import INFINITY, bits_of, float_of, narrow, widen
from narrowgauge.kernels._step._packing import (
    beyond_half,
    bf16_as,
    cut_words,
    flipped_nibbles,
    from_flipped_nibbles,
    from_uppers,
    halves_of,
    offsets_of,
    uppers,
)


@triton.jit
def _wide(words, KIND: tl.constexpr):
    """Words of the parameter as float32, also where bf16 comes in pairs."""
    if KIND == "bf16":
        return float_of(uppers(words))
    else:
        return widen(words, KIND)


@triton.jit
def plain_read(p, low, KIND: tl.constexpr):
    return _wide(p, KIND)


@triton.jit
def plain_add(p, low, weight, delta, KIND: tl.constexpr):
    hi = narrow(weight + delta, KIND)
    return hi, hi


stochastic_read = plain_read


@triton.jit
def stochastic_add(p, low, weight, delta, random, KIND: tl.constexpr):
    hi = _stochastic(weight + delta, random, KIND)
    return hi, hi


kahan_read = plain_read


@triton.jit
def kahan_add(p, low, weight, delta, KIND: tl.constexpr):
    owed = delta + _bounded(p, low, KIND)
    hi = narrow(weight + owed, KIND)
    return hi, _remainder(owed - (widen(hi, KIND) - weight), hi, KIND)


@triton.jit
def kahan_moved(p, low, p_new, low_new, KIND: tl.constexpr):
    carried = _bounded(p_new, low_new, KIND) - _bounded(p, low, KIND)
    return widen(p_new, KIND) - widen(p, KIND) + carried


@triton.jit
def fast_kahan_read(p, low):
    return float_of(uppers(p))


@triton.jit
def kahan_read_unusual(p, low):
    return beyond_half(p, low)  # a low word may be left over from another parameter


@triton.jit
def fast_kahan_add(p, low, weight, delta):
    carried = float_of(uppers(low))
    owed = delta + carried
    hi = bf16_as(weight + owed, p)
    seen = float_of(uppers(hi))
    rest = owed - (seen - weight)
    lo = bf16_as(rest, p)
    visible = seen - weight
    return hi, lo, visible + (float_of(uppers(lo)) - carried), visible, rest


@triton.jit
def expansion_read(p, low, KIND: tl.constexpr):
    return _wide(p, KIND) + _bounded(p, low, KIND)


@triton.jit
def expansion_add(p, low, weight, delta, KIND: tl.constexpr):
    updated = weight + delta
    hi = narrow(updated, KIND)
    return hi, _remainder(updated - widen(hi, KIND), hi, KIND)


expansion_moved = kahan_moved


@triton.jit
def fast_expansion_read(p, low):
    return float_of(uppers(p)) + float_of(uppers(low))


expansion_read_unusual = kahan_read_unusual


@triton.jit
def fast_expansion_add(p, low, weight, delta):
    updated = weight + delta
    hi = bf16_as(updated, p)
    seen = float_of(uppers(hi))
    rest = updated - seen
    lo = bf16_as(rest, p)
    visible = seen - float_of(uppers(p))
    return hi, lo, visible + (float_of(uppers(lo)) - float_of(uppers(low))), visible, rest


@triton.jit
def split_read(p, low, KIND: tl.constexpr):
    return _join(uppers(p), low.to(tl.int32))


@triton.jit
def split_add(p, low, weight, delta, KIND: tl.constexpr):
    hi, lo = _cut_halves(bits_of(weight + delta))
    return _finite_or_nearest(weight + delta, hi, lo)


# Where a parameter is split, rare is a borrow from a zero, or a carry into infinity's neighbors. Both make the
# weight a NaN or infinity, and its update too, which is looked at.


@triton.jit
def fast_split_read(p, low):
    return float_of(uppers(p) + low.to(tl.int32))


@triton.jit
def fast_split_add(p, low, weight, delta):
    updated = weight + delta
    hi, lo = _cut_halves(bits_of(updated))
    seen = float_of((bits_of(updated) + 0x8000) & -0x10000)
    return hi, lo, updated - weight, seen - float_of(uppers(p)), updated


@triton.jit
def split8_read(p, low, KIND: tl.constexpr):
    return _join(uppers(p), offsets_of(low))


@triton.jit
def split8_add(p, low, weight, delta, KIND: tl.constexpr):
    hi, lo = _cut_bytes(bits_of(weight + delta))
    return _finite_or_nearest(weight + delta, hi, lo)


@triton.jit
def fast_split8_read(p, low):
    return float_of(uppers(p) + offsets_of(low))


@triton.jit
def fast_split8_add(p, low, weight, delta):
    updated = weight + delta
    if p.dtype == tl.int32:
        hi, lo = cut_words(bits_of(updated))
    else:
        hi, lo = _cut_bytes(bits_of(updated))
    stored = float_of((bits_of(updated) + 0x80) & -0x100) - weight
    return hi, lo, stored, float_of(uppers(hi)) - float_of(uppers(p)), updated


@triton.jit
def split4_read(p, codes, KIND: tl.constexpr):
    return _join(uppers(p), _offsets_of_codes(codes))


@triton.jit
def split4_add(p, codes, weight, delta, random, KIND: tl.constexpr):
    bits = _rounded_to_20(weight + delta, random)
    return _finite_or_nearest(weight + delta, ((bits + 0x8000) >> 16).to(tl.int16), (bits >> 12) & 0xF)


@triton.jit
def fast_split4_read(p, low):
    # With its highest bit flipped a low word is 2^15 more, and lies in bits where the parameter has zeros.
    return float_of(((flipped_nibbles(low) & 0xF000) | uppers(p)) - 0x8000)


@triton.jit
def fast_split4_add(p, low, weight, delta, random):
    updated = weight + delta
    # Half a unit of the parameter more: the bits of hi, and of the flipped low word. What is below does not count.
    both = bits_of(updated) + (((random >> 12) & 0xFF0).to(tl.int32) + 0x8008)
    if p.dtype == tl.int32:
        hi = from_uppers(both)
    else:
        hi = (both >> 16).to(tl.int16)
    stored = float_of((both - 0x8000) & -0x1000) - weight
    return hi, from_flipped_nibbles(both, low), stored, float_of(both & -0x10000) - float_of(uppers(p)), updated


@triton.jit
def _offsets_of_codes(codes):
    """Codes of 4 bits in two's complement, 2^12 times."""
    return (codes << 28) >> 16


@triton.jit
def _rounded_to_20(x, random):
    """The bits of x, rounded stochastically to the upper 20 by the lower eight of 16 random bits."""
    return (bits_of(x) + (((random >> 12) & 0xFF0).to(tl.int32) + 8)) & -0x1000


@triton.jit
def master_read(p, low, KIND: tl.constexpr):
    # A master copy that is no longer what the parameter rounds from is out of date: the parameter counts.
    seen = _wide(p, KIND)
    return tl.where(widen(narrow(low, KIND), KIND) == seen, low, seen)


@triton.jit
def master_add(p, low, weight, delta, KIND: tl.constexpr):
    updated = weight + delta
    return narrow(updated, KIND), updated


@triton.jit
def _join(bits, offset):
    """The weight of the parameter as the upper half of 32 bits, and units in a float32's last place.

    NaN stays, and nothing passes zero or infinity.
    """
    magnitude = bits & 0x7FFFFFFF
    offset = tl.where(magnitude == 0, tl.maximum(offset, 0), offset)
    offset = tl.where(magnitude == INFINITY, tl.minimum(offset, 0), offset)
    return float_of(bits + tl.where(magnitude > INFINITY, 0, offset))


@triton.jit
def _cut_bytes(bits):
    """(bf16 word, int8 low word) of a finite float32's bits; see `cut_words`."""
    both = bits + 0x8080
    return (both >> 16).to(tl.int16), (both >> 8).to(tl.int8) ^ -128


@triton.jit
def _cut_halves(bits):
    """(bf16 word, int16 low word) of a finite float32's bits."""
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)


@triton.jit
def _finite_or_nearest(weight, hi, low):
    odd = (bits_of(weight) & 0x7FFFFFFF) >= INFINITY
    return tl.where(odd, narrow(weight, "bf16"), hi), tl.where(odd, 0, low).to(low.dtype)


@triton.jit
def _half_ulp(p, KIND: tl.constexpr):
    """Half a unit in the last place of a parameter, as float32; zero where it is not finite."""
    if KIND == "bf16":
        exponent = (p.to(tl.int32) >> 7) & 0xFF
        exponent = tl.maximum(exponent, 1)
        # Below the normal numbers a power of two is a bit of the fraction. bf16 has no 2^-134.
        bits = tl.where(exponent > 8, (exponent - 8) << 23, 1 << (tl.minimum(exponent, 8) + 14))
        bits = tl.where(exponent == 1, 0, bits)
        return tl.where(exponent == 0xFF, 0.0, float_of(bits))
    else:
        exponent = tl.maximum((p.to(tl.int32) >> 10) & 0x1F, 1)
        # 2^(exponent - 15 - 10 - 1), and fp16 has no 2^-25.
        half = float_of((exponent + 127 - 26) << 23)
        return tl.where((exponent == 1) | (exponent == 0x1F), 0.0, half)


@triton.jit
def _bounded(p, low, KIND: tl.constexpr):
    """A low word that is a float, half a unit in the last place of the parameter at most."""
    half = _half_ulp(halves_of(p), KIND)
    x = _wide(low, KIND)
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
