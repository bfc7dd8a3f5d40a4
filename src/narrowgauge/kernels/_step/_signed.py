# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""First moments that are alone, in logarithmic codes with a sign: `narrowgauge.storage._log_codes`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import (
    INFINITY,
    LARGEST,
    SMALLEST,
    TINY,
    bits_of,
    exact_quotient,
    exact_ratio,
    float_of,
    nearest,
)
from narrowgauge.kernels._step._states import column_max, column_min, column_peak


@triton.jit
def signed_decode(codes, foot, top):
    lo, span = _ends(foot, top)
    k = codes.to(tl.int32)
    step = exact_quotient(tl.maximum(span, 1.0), 127.0)
    return _value(k & 127, k << 24, lo, tl.where(span > 0, step, 0.0), foot, top)


@triton.jit
def signed_encode(x):
    """(codes, c, the largest magnitude, what is lost of x)."""
    magnitude = tl.abs(x)
    infinite = magnitude == float("inf")
    magnitude = tl.where(magnitude >= TINY, magnitude, 0.0)
    finite = tl.where(infinite, 0.0, magnitude)
    top = float_of(column_max(bits_of(finite)))
    top = tl.where((top == 0) & (column_max(infinite.to(tl.int32)) > 0), LARGEST, top)
    magnitude = tl.where(infinite, top, magnitude)
    least = float_of(column_min(bits_of(tl.where(finite > 0, finite, LARGEST))))
    foot = tl.minimum(tl.maximum(least * 8.0, top * 2.0**-24), top * 2.0)
    foot = tl.minimum(tl.maximum(foot, TINY), LARGEST)
    foot = tl.where(top > 0, float_of(bits_of(foot) & INFINITY), 0.0)
    lo, span = _ends(foot, top)
    rate = tl.where(span > 0, tl.div_rn(127.0 * 65536, tl.where(span > 0, span, 1.0)), 0.0)
    above = tl.maximum(bits_of(magnitude + foot) - lo, 0).to(tl.float32)
    k = tl.minimum(((above * rate).to(tl.int32) + 32768) >> 16, 127)
    k = tl.where(magnitude > 0, tl.where(magnitude == top, 127, k), 0)
    negative = (x < 0) & (k > 0)
    lost = x - _value(k, bits_of(x), lo, tl.div_rn(span, 127.0), foot, top)
    lost = tl.where((bits_of(lost) & INFINITY) == INFINITY, 0.0, lost)
    return tl.where(negative, k + 128, k), foot, top, lost


@triton.jit
def usual_signed_encode(x):
    """The same, and whether a block has what is infinite, or too small."""
    magnitude = tl.abs(x)
    peak = column_peak(x)
    # Zeros aside, which as unsigned numbers are the largest when one is taken off.
    least = column_min((bits_of(magnitude) - 1).to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True) + 1
    top = float_of(peak)
    foot = tl.minimum(tl.maximum(float_of(least) * 8.0, top * 2.0**-24), top * 2.0)
    foot = float_of(bits_of(tl.minimum(tl.maximum(foot, TINY), LARGEST)) & INFINITY)
    foot = tl.where(peak == 0, 0.0, foot)
    lo, span = _ends(foot, top)
    above = (bits_of(magnitude + foot) - lo).to(tl.float32)
    k = ((above * exact_ratio(127.0 * 65536, tl.where(peak == 0, 1.0, span))).to(tl.int32) + 32768) >> 16
    lost = x - _value(k, bits_of(x), lo, exact_quotient(span, 127.0), foot, top)
    unusual = (peak >= INFINITY) | ((peak > 0) & ((peak < SMALLEST) | (least < SMALLEST)))
    # -k is negative where k is not zero.
    return k | (((bits_of(x) & -k) >> 24) & 128), foot, top, lost, unusual


@triton.jit
def _ends(foot, top):
    """The pattern of c, and how far that of the largest element lies above it."""
    lo = bits_of(foot)
    return lo, (bits_of(top + foot) - lo).to(tl.float32)


@triton.jit
def _value(k, sign, lo, step, foot, top):
    """What k stands for, with the sign bit of `sign`."""
    index = nearest(k.to(tl.float32) * step)
    value = tl.where(k == 127, top, float_of(lo + index) - foot)
    return float_of(bits_of(value) | (sign & -0x80000000))
