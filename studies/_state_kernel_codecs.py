"""Codecs as Triton functions, to be compiled and their instructions counted (see `_state_kernels`).

`a` and `b` are two numbers of the block, `table` the codebook and its inverse; P is the power, or the form. Signs
and ends are treated as in the codecs that they stand for, NaN and infinities are not.
"""

import triton
import triton.language as tl


@triton.jit
def _sign(magnitude, x):
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def table_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    value = tl.load(table + code.to(tl.int32)) * a
    return value * value if P == 2 else value


@triton.jit
def table_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
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
def power_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
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
def softsign_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
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
def e4m3_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
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
def log2_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = tl.maximum((tl.log2(tl.abs(x)) - a) * b + 1.5, 1.0).to(tl.int32)
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
def log_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    low, high, n = _ends(a, b, SIGNED, P)
    magnitude = tl.abs(x)
    pattern = (magnitude + a if SIGNED else x).to(tl.int32, bitcast=True)
    fine = (tl.maximum(pattern - low, 0).to(tl.float32) * (65536.0 * n / (high - low).to(tl.float32))).to(tl.int32)
    # Half a code for the nearest; 16 random bits in its place to round stochastically.
    k = tl.where(magnitude == b, n, tl.minimum((fine + 32768) >> 16, n))
    k = tl.where((x < 0) & (k > 0), k + n + 1, k) if SIGNED else k + 1
    return tl.where(magnitude > 0, k, 0).to(tl.uint8)


@triton.jit
def _ends(a, b, SIGNED: tl.constexpr, P: tl.constexpr):
    """Patterns of the ends of a block's range, and steps between them."""
    high = (b + a if SIGNED else b).to(tl.int32, bitcast=True)
    return a.to(tl.int32, bitcast=True), high, (2 ** (P - 1) - 1) if SIGNED else 2**P - 2


@triton.jit
def relative_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    k = (code & 127).to(tl.float32)
    value = tl.where(k == 127.0, b, k * a)
    return tl.where(code > 127, -value, value)


@triton.jit
def relative_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = tl.abs(x)
    k = tl.where(y == b, 127, tl.minimum(y * a + 0.5, 127.0).to(tl.int32))
    return tl.where((x < 0) & (k > 0), k + 128, k).to(tl.uint8)


@triton.jit
def e2m1_decode(code, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    # Its numbers lie on three lines, of which the steepest that is reached is the largest.
    k = (code & 7).to(tl.float32)
    value = tl.maximum(tl.maximum(0.5 * k, k - 2.0), 2.0 * k - 8.0) * a
    value = tl.where(k == 7.0, b, value)
    return tl.where(code > 7, -value, value)


@triton.jit
def e2m1_encode(x, a, b, table, SIGNED: tl.constexpr, P: tl.constexpr):
    y = tl.abs(x) * a
    k = tl.minimum(tl.minimum(2.0 * y + 0.5, y + 2.5), 0.5 * y + 4.5).to(tl.int32)
    k = tl.where(tl.abs(x) == b, 7, k)
    return tl.where((x < 0) & (k > 0), k + 8, k).to(tl.uint8)
