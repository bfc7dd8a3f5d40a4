"""Multi-component floats: numbers kept as the unevaluated sum of two narrow ones.

The sum of two floats is rarely a float, but the *error* of their rounded sum always is one. Keeping both words
(hi, lo), with hi the rounded value and lo what rounding cut off, holds twice the digits using nothing but the
narrow format's own operations. These are the building blocks; each works on tensors of any float dtype and
rounds every operation to it, to nearest, once.

Source: Collage, Section 4.1 and Appendix C; Dekker 1971; Moller and Knuth for TwoSum; Veltkamp for Split.
"""

from __future__ import annotations

import torch
from torch import Tensor

Expansion = tuple[Tensor, Tensor]

# A product of two numbers of the key is exact in the value: 2p <= p', exponents included barring underflow.
_EXACT_PRODUCT = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}

# Significant bits p, the hidden one counted.
_PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def fast_two_sum(a: Tensor, b: Tensor) -> Expansion:
    """a + b = hi + lo exactly, given |a| >= |b| (or a = 0) and no overflow.

    Source: Collage, Theorem 4.1 (Dekker 1971).
    """
    hi = a + b
    return hi, b - (hi - a)


def two_sum(a: Tensor, b: Tensor) -> Expansion:
    """a + b = hi + lo exactly for any order of magnitudes, barring overflow.

    Source: Collage, Appendix C, TwoSum.
    """
    hi = a + b
    b_virtual = hi - a
    a_virtual = hi - b_virtual
    return hi, (a - a_virtual) + (b - b_virtual)


def split(a: Tensor) -> Expansion:
    """a = hi + lo exactly, each with at most half of a's significant bits, barring overflow.

    The paper's Algorithm 3 takes c = floor(p / 2) with p not counting the hidden bit, which leaves the halves of
    many numbers too long for their products to be exact; with the hidden bit counted, c = ceil(p / 2) works.

    Raises:
        ValueError: for a dtype without arithmetic of its own (float8).
    """
    if a.dtype not in _PRECISION:
        raise ValueError(f"a: got {a.dtype}, takes bfloat16, float16, float32 or float64")
    shift = -(-_PRECISION[a.dtype] // 2)
    t = a * (2.0**shift + 1)
    hi = t - (t - a)
    return hi, a - hi


def two_prod(a: Tensor, b: Tensor) -> Expansion:
    """a * b = hi + lo exactly, barring overflow and underflow, by splitting both factors.

    Source: Collage, Appendix C, Algorithm 4 (whose `p` is the rounded product, here `hi`).
    """
    hi = a * b
    (a_hi, a_lo), (b_hi, b_lo) = split(a), split(b)
    error = ((hi - a_hi * b_hi) - a_lo * b_hi) - a_hi * b_lo
    return hi, a_lo * b_lo - error


def two_prod_fma(a: Tensor, b: Tensor) -> Expansion:
    """a * b = hi + lo exactly, barring overflow and underflow, by one fused multiply-add.

    The fused operation is taken in a format wide enough for the exact product and rounded once.

    Raises:
        ValueError: for float64, which has no wider format here; `two_prod` serves it.

    Source: Collage, Appendix C, Algorithm 5.
    """
    if a.dtype not in _EXACT_PRODUCT:
        raise ValueError(f"a: got {a.dtype}, takes bfloat16, float16 or float32 (two_prod takes float64)")
    wide = _EXACT_PRODUCT[a.dtype]
    hi = a * b
    return hi, (a.to(wide) * b.to(wide) - hi.to(wide)).to(a.dtype)


def scaling(a: Expansion, v: Tensor) -> Expansion:
    """(hi, lo) * v as an expansion.

    Source: Collage, Appendix C, Algorithm 6.
    """
    x, e = two_prod_fma(a[0], v)
    return fast_two_sum(x, a[1] * v + e)


def mul(a: Expansion, b: Expansion) -> Expansion:
    """(hi, lo) * (hi, lo) as an expansion; the product of the low words is below its precision.

    Source: Collage, Appendix C, Algorithm 7.
    """
    x, e = two_prod_fma(a[0], b[0])
    return fast_two_sum(x, e + (a[0] * b[1] + a[1] * b[0]))


def grow(x: Expansion, a: Tensor) -> Expansion:
    """(hi, lo) + a as an expansion, given |hi| >= |a|.

    Source: Collage, Algorithm 1.
    """
    u, v = fast_two_sum(x[0], a)
    return fast_two_sum(u, x[1] + v)
