"""Codecs as Triton functions, to be compiled and their instructions counted (see `kernels.py`).

`a` and `b` are two numbers of the block, `table` the codebook and its inverse; P is the power, or the bits of a
code. `bits` are 16 random bits an element, None to round to nearest. Signs and ends are treated as in the
codecs that they stand for, NaN and infinities are not.

Those of the library's second and relative first moments find a block's numbers themselves, and give with the code
what it stands for: a kernel that hands over decodes nothing twice. They are the library's to the bit.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_ROUNDER = tl.constexpr(
    1.5 * 2.0**23
)  # with it a number is rounded to an integer, ties to even, in its lowest bits
_SMALLEST = tl.constexpr(1 << 23)  # the pattern of the smallest normal number
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _sign(magnitude, x):
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def table_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    value = tl.load(table + code.to(tl.int32)) * a
    return value * value if P == 2 else value


@triton.jit
def table_encode(x, a, b, bits, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = tl.sqrt_rn(x) * a if P == 2 else x * a
    bits = tl.abs(y).to(tl.int32, bitcast=True)
    entry = tl.load(table.to(tl.pointer_type(tl.int32)) + 256 + tl.maximum((bits >> 16) - 12416, 0))
    code = (entry >> 16) + ((bits & 0xFFFF) > (entry & 0xFFFF)).to(tl.int32)
    # Negative codes mirror the positive ones around that of zero.
    return (tl.where(x < 0, 254 - code, code) if SIGNED else code).to(tl.uint8)


@triton.jit
def power_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = code.to(tl.int8, bitcast=True).to(tl.float32) if SIGNED else code.to(tl.float32)
    y = tl.abs(k)
    if P == 2:
        y = k * y if SIGNED else k * k
    elif P == 4:
        y = (k * k) * (k * y)
    elif P == 15:
        y = k * tl.sqrt(y)
    else:
        y = k
    return y * a


@triton.jit
def power_encode(x, a, b, bits, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = tl.abs(x) * a
    if P == 2:
        y = tl.sqrt_rn(y)
    elif P == 4:
        y = tl.sqrt_rn(tl.sqrt_rn(y))
    elif P == 15:
        y = tl.exp2(tl.log2(y) * 0.6666667)
    k = (y * b + 0.5).to(tl.int32)
    return (_sign(k, x) if SIGNED else k).to(tl.uint8)


@triton.jit
def softsign_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = code.to(tl.int8, bitcast=True).to(tl.float32) * 0.007874016
    return y / (2.0 - tl.abs(y)) * a


@triton.jit
def softsign_encode(x, a, b, bits, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = x * a
    y = 2.0 * y / (1.0 + tl.abs(y)) * 127.0
    return (_sign(tl.abs(y) + 0.5, y)).to(tl.int32).to(tl.uint8)


@triton.jit
def e4m3_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if P == 0:
        y = _sign(tl.exp2(tl.log2(tl.abs(y)) * b), y)
    return y * a


@triton.jit
def e4m3_encode(x, a, b, bits, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = x * a
    if P == 0:
        y = _sign(tl.exp2(tl.log2(tl.abs(y)) * b), y)
    return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def log2_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = code.to(tl.int8, bitcast=True).to(tl.float32) if SIGNED else code.to(tl.float32)
    value = tl.exp2((tl.abs(k) - 1.0) * b + a)
    return tl.where(code == 0, 0.0, _sign(value, k) if SIGNED else value)


@triton.jit
def log2_encode(x, a, b, bits, table, SIGNED: tl.constexpr, P: tl.constexpr):
    half = 0.5 if bits is None else bits.to(tl.float32) * 2.0**-16
    k = tl.maximum((tl.log2(tl.abs(x)) - a) * b + (1.0 + half), 1.0).to(tl.int32)
    k = tl.where(x == 0, 0, k)
    return (_sign(k, x) if SIGNED else k).to(tl.uint8)


@triton.jit
def log_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    low, high, n = _ends(a, b, SIGNED, P)
    k = code.to(tl.int32)
    k = (k & n) if SIGNED else k - 1
    pattern = low + (k.to(tl.float32) * ((high - low).to(tl.float32) / n) + 0.5).to(tl.int32)
    value = pattern.to(tl.float32, bitcast=True)
    value = tl.where(k == n, b, value - a if SIGNED else value)
    if SIGNED:
        return tl.where(code > n, -value, value)
    return tl.where(code > 0, value, 0.0)


@triton.jit
def log_encode(x, a, b, bits, table, SIGNED: tl.constexpr, P: tl.constexpr):
    low, high, n = _ends(a, b, SIGNED, P)
    magnitude = tl.abs(x)
    pattern = (magnitude + a if SIGNED else x).to(tl.int32, bitcast=True)
    fine = (tl.maximum(pattern - low, 0).to(tl.float32) * (65536.0 * n / (high - low).to(tl.float32))).to(tl.int32)
    half = 32768 if bits is None else bits.to(tl.int32)
    k = tl.where(magnitude == b, n, tl.minimum((fine + half) >> 16, n))
    k = tl.where((x < 0) & (k > 0), k + n + 1, k) if SIGNED else k + 1
    return tl.where(magnitude > 0, k, 0).to(tl.uint8)


@triton.jit
def _ends(a, b, SIGNED: tl.constexpr, P: tl.constexpr):
    """Patterns of the ends of a block's range, and steps between them."""
    high = (b + a if SIGNED else b).to(tl.int32, bitcast=True)
    return a.to(tl.int32, bitcast=True), high, (2 ** (P - 1) - 1) if SIGNED else 2**P - 2


@triton.jit
def pattern_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    word = a.to(tl.int32, bitcast=True)
    base, step = word & ~0xFFF, _power(word & 0xFFF)
    k = code.to(tl.int32)
    return tl.where(k > 0, k * step + (base - step), 0).to(tl.float32, bitcast=True)


@triton.jit
def pattern_encode(x, bits, P: tl.constexpr):
    pattern, lo, hi = _ends_of(x, 63 if P == 8 else 48)
    steps: tl.constexpr = 254 if P == 8 else 14
    s = tl.maximum(_bit_length((hi - lo) // (steps + 2)), 12)
    s += (((hi + (1 << s) - 1) >> s) - (lo >> s) > steps).to(tl.int32)
    word = tl.where(hi >= _SMALLEST, tl.maximum((lo >> s) << s, _SMALLEST) + s, 0)
    s, base = word & 0xFFF, word & ~0xFFF
    step = _power(s)
    more = step >> 1 if bits is None else ((bits.to(tl.uint32) << 16) >> (32 - s).to(tl.uint32)).to(tl.int32)
    k = tl.minimum((tl.maximum(pattern, lo) + (step - base) + more) >> s, ((-base + (_INFINITY - 1)) >> s) + 1)
    there = pattern >= _SMALLEST
    value = tl.where(there, k * step + (base - step), 0).to(tl.float32, bitcast=True)
    return tl.where(there, k, 0).to(tl.uint8), value, word.to(tl.float32, bitcast=True)


@triton.jit
def _power(s):
    """2^s for s from 12 on. By 1 << s compilers do not multiply and add at once: they shift, and add after."""
    return 128 << tl.maximum(s - 7, 0)


@triton.jit
def whole_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    base, step = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    k = code.to(tl.int32)
    return tl.where(k > 0, k * step + (base - step), 0).to(tl.float32, bitcast=True)


@triton.jit
def whole_encode(x, bits, P: tl.constexpr):
    pattern, lo, hi = _ends_of(x, 48)
    base = tl.where(hi >= _SMALLEST, lo, 0)
    step = tl.where(hi >= _SMALLEST, tl.maximum((hi - lo + 13) // 14, 1), 0)
    positive = tl.maximum(step, 1).to(tl.uint32)
    more = step >> 1 if bits is None else tl.umulhi(bits.to(tl.uint32) << 16, positive).to(tl.int32)
    over = (tl.zeros_like(positive) - 1) // positive
    n = tl.maximum(pattern, lo) + (step - base) + more
    # n / step is 16 at most: with one over step rounded down the quotient is right, or one too small.
    k = tl.umulhi(n.to(tl.uint32), over).to(tl.int32)
    k += (n - k * step >= step).to(tl.int32)
    k = tl.minimum(k, (-base + (_INFINITY - 1)) // positive.to(tl.int32) + 1)
    there = pattern >= _SMALLEST
    value = tl.where(there, k * step + (base - step), 0).to(tl.float32, bitcast=True)
    code = tl.where(there, k, 0).to(tl.uint8)
    return code, value, base.to(tl.float32, bitcast=True), step.to(tl.float32, bitcast=True)


@triton.jit
def _ends_of(x, BINADES: tl.constexpr):
    """Patterns, and the least and the largest of a block that are kept apart."""
    pattern = x.to(tl.int32, bitcast=True)
    hi = tl.max(pattern, axis=0)
    # Unsigned, what is below the smallest normal number is the largest of all.
    least = tl.min((pattern - _SMALLEST).to(tl.uint32, bitcast=True), axis=0)
    lo = tl.minimum(least, _INFINITY - 1 - _SMALLEST).to(tl.int32) + _SMALLEST
    return pattern, tl.maximum(tl.minimum(lo, hi), tl.maximum(hi - (BINADES << 23), _SMALLEST)), hi


@triton.jit
def _bit_length(x):
    return tl.maximum((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def relative_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    return code.to(tl.int8, bitcast=True).to(tl.float32) * a


@triton.jit
def relative_encode(x, bits, P: tl.constexpr):
    scale, over = _scale(x, 127.0)
    rounded = _product(x, over) + _ROUNDER
    return rounded.to(tl.int32, bitcast=True).to(tl.uint8), (rounded - _ROUNDER) * scale, scale


@triton.jit
def _scale(x, outermost):
    """A block's scale, and one over it; zero both where it is zero."""
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), outermost)
    scale = tl.where(scale >= 2.0**-126, scale, 0.0)
    return scale, tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)


@triton.jit
def _product(x, y):
    """Rounded before anything is added to it."""
    return x * y if _INTERPRETED else libdevice.mul_rn(x, y)


@triton.jit
def e2m1_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    # Exponent and fraction where a float has them; its own exponent is 126 larger.
    k = code.to(tl.int32)
    bits = ((k & 7) << 22) | ((k & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126 * a


@triton.jit
def e2m1_encode(x, bits, P: tl.constexpr):
    scale, over = _scale(x, 6.0)
    y = tl.abs(_product(x, over))
    # The numbers lie on three lines, of which the flattest that is reached is the smallest.
    k = tl.ceil(tl.minimum(tl.minimum(2.0 * y - 0.5, y + 1.5), 0.5 * y + 3.5)).to(tl.int32)
    code = tl.where((x < 0) & (k > 0), k + 8, k)
    return code.to(tl.uint8), e2m1_decode(code, scale, 0.0, 0, True, 4), scale
