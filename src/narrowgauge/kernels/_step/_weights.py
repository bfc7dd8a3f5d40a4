# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Weights on a tile: what the rule sees of the stored words, and the words after its update.

The specification is `narrowgauge.storage._weights`, a storage a name. Words come and go as they lie in memory: bf16
and fp16 as int16 bits (`KIND`), low words in their own dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import INFINITY, bits_of, float_of, narrow, widen


@triton.jit
def read_weight(p, low, STORAGE: tl.constexpr, KIND: tl.constexpr):
    """The float32 weight of what is not split."""
    if STORAGE == "expansion":
        return widen(p, KIND) + bounded_low(p, low, KIND)
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
        owed = delta + bounded_low(p, low, KIND)
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
def usual_join(bits, offset):
    """The weight of a split one, of the parameter as the upper half of 32 bits and units in a float32's last place.

    Rare: a borrow from a zero, or a carry into infinity's neighbours. Both make it no number, which whoever adds to
    it will notice.
    """
    return float_of(bits + offset)


@triton.jit
def join(bits, offset):
    """The same for every weight: what is no number stays none, nothing passes zero or infinity."""
    magnitude = bits & 0x7FFFFFFF
    offset = tl.where(magnitude == 0, tl.maximum(offset, 0), offset)
    offset = tl.where(magnitude == INFINITY, tl.minimum(offset, 0), offset)
    return float_of(bits + tl.where(magnitude > INFINITY, 0, offset))


@triton.jit
def _cut(weight, SHIFT: tl.constexpr):
    # Of a number in sign and magnitude the lowest bits do not know the sign: no need to take it off.
    bits = bits_of(weight)
    if SHIFT == 8:
        hi, low = bytes_cut(bits)
    else:
        hi, low = halves_cut(bits)
    odd = (bits & 0x7FFFFFFF) >= INFINITY
    return tl.where(odd, narrow(weight, "bf16"), hi), tl.where(odd, 0, low).to(low.dtype)


@triton.jit
def bytes_cut(bits):
    """(bf16 word, int8 low word), likewise: see `cut_words`."""
    both = bits + 0x8080
    return (both >> 16).to(tl.int16), (both >> 8).to(tl.int8) ^ -128


@triton.jit
def halves_cut(bits):
    """(bf16 word, int16 low word) of a finite float32's bits."""
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)


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
def bounded_low(p, low, KIND: tl.constexpr):
    """A low word that is a float, half a unit in the last place of the parameter at most."""
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
