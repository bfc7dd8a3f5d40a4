"""Multi-component floats: numbers kept as the unevaluated sum of two narrow ones.

The sum of two floats is rarely a float, but the *error* of their rounded sum always is one, and so is that of
their product unless it is too small. Keeping both words (hi, lo), hi the rounded value and lo what rounding cut
off, holds twice the digits by the narrow format's own operations. Four functions are exact, `fast_two_sum`,
`two_sum`, `two_prod`, `two_prod_fma`; three compute with expansions, `grow` (+ number), `scaling` (* number) and
`mul` (* expansion), and are wrong by a few u^2, where one rounding of the format is wrong by u = 2^-p.

Tensors are of one dtype among bfloat16, float16, float32, float8_e4m3fn and float8_e5m2 (float64 for the sums,
`split` and `two_prod`) and of shapes that broadcast. Every operation is rounded to the format once, to nearest,
ties to even; p counts the hidden bit: 8, 11, 24, 4, 3. An expansion is *normalised* when hi = rn(hi + lo), so that
|lo| <= ulp(hi) / 2. Every function returns such a pair under its conditions, and those that take one expect one.

Conditions common to all: no operation overflows. If one does, words are infinite or NaN; e4m3 has no infinity,
its operations stop at 448 and nothing tells, so that it is for the caller to stay below. Sums have no underflow,
an inexact one being far above the smallest number. Products do: where a b is no multiple of min_subnormal its
error is no number of the format, and each such product adds up to min_subnormal / 2 to the errors stated. It cannot
happen from |a b| >= 2^p min_normal upwards.

The bounds are proved, in docs/expansions.md or where it says; tests hold every function against them, and the
figures of that page are what they measured.

Source: Collage, Section 4.1 and Appendix C; Dekker 1971 for Fast2Sum and TwoProd, Moller and Knuth for TwoSum,
Veltkamp for Split; Joldes, Muller and Popescu, Tight and rigorous error bounds for basic building blocks of
double-word arithmetic, ACM TOMS 44(2), 2017, and Muller and Rideau, Formalization of double-word arithmetic, ACM
TOMS 48(1), 2022, for `grow`, `scaling` and `mul`, which are their DWPlusFP, DWTimesFP3 and DWTimesDW1.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.storage._rounded import PRECISION, WIDE, add, check, check_pair, fma, product_error, scale, sub
from narrowgauge.storage._rounded import mul as times

Expansion = tuple[Tensor, Tensor]


def fast_two_sum(a: Tensor, b: Tensor) -> Expansion:
    """a + b = hi + lo exactly, given |a| >= |b|, or a = 0, or any a that is a multiple of ulp(b); three operations.

    Otherwise hi is still rn(a + b), and hi + lo is wrong by no more than |a|, nor than ulp(hi) / 2.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Theorem 4.1 (Dekker 1971).
    """
    check(PRECISION, a=a, b=b)
    return _fast_two_sum(a, b)


def two_sum(a: Tensor, b: Tensor) -> Expansion:
    """a + b = hi + lo exactly for any order of magnitudes; six operations.

    Numbers up to max / 2 cannot overflow. Beyond, hi - a may where hi does not.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Appendix C, Algorithm 2 (Moller 1965, Knuth).
    """
    check(PRECISION, a=a, b=b)
    hi = add(a, b)
    b_virtual = sub(hi, a)
    a_virtual = sub(hi, b_virtual)
    return hi, add(sub(a, a_virtual), sub(b, b_virtual))


def split(a: Tensor) -> Expansion:
    """a = hi + lo exactly: hi of p - c significant bits, lo of c - 1, c = ceil(p / 2).

    Products of such halves are exact. The paper takes c = floor(p / 2); if p leaves out the hidden bit, as its
    tables do, hi is too long for that in bf16, fp16 and fp32.

    The factor 2^c + 1 lowers the largest number that can be split: |a| <= max / (2^c + 1) is safe, which is 1007.5
    for fp16, 88 for e4m3 and 10240 for e5m2.

    Raises:
        ValueError: for a tensor that is not of a float dtype.

    Source: Collage, Appendix C, Algorithm 3 (Veltkamp 1968), with c corrected.
    """
    check(PRECISION, a=a)
    t = scale(a, 2.0 ** -(-PRECISION[a.dtype] // 2) + 1)
    hi = sub(t, sub(t, a))
    return hi, sub(a, hi)


def two_prod(a: Tensor, b: Tensor) -> Expansion:
    """a * b = hi + lo exactly, if a * b is a multiple of min_subnormal; 17 operations of the format.

    No overflow means here that `split` takes a and b, and |a b| <= max / 2.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Appendix C, Algorithm 4 (Dekker 1971), whose `p` is the rounded product, here hi.
    """
    check(PRECISION, a=a, b=b)
    hi = times(a, b)
    (a_hi, a_lo), (b_hi, b_lo) = split(a), split(b)
    error = sub(sub(sub(hi, times(a_hi, b_hi)), times(a_lo, b_hi)), times(a_hi, b_lo))
    return hi, sub(times(a_lo, b_lo), error)


def two_prod_fma(a: Tensor, b: Tensor) -> Expansion:
    """a * b = hi + lo exactly if a * b is a multiple of min_subnormal; else lo is the nearest number to the error.

    The fused multiply-add is taken in a format that holds the product exactly, and rounded once.

    Raises:
        ValueError: for tensors that are not of one float dtype, or of float64, for which torch has no wider format
            (`two_prod` takes it).

    Source: Collage, Appendix C, Algorithm 5.
    """
    check(WIDE, a=a, b=b)
    return _two_prod_fma(a, b)


def scaling(a: Expansion, v: Tensor) -> Expansion:
    """(hi, lo) * v as a normalised expansion, wrong by less than 2 u^2 of it, and min_subnormal if it underflows.

    Line 3 of the algorithm is one fused multiply-add, as its notation has it and as in line 4 of Algorithm 5;
    with a product and a sum rounded apart the bound would be 3 u^2.

    Raises:
        ValueError: as `two_prod_fma`.

    Source: Collage, Appendix C, Algorithm 6; Joldes, Muller and Popescu, Algorithm 9 (DWTimesFP3).
    """
    check_pair("a", a)
    check(WIDE, **{"a[0]": a[0], "a[1]": a[1], "v": v})
    x, e = _two_prod_fma(a[0], v)
    return _fast_two_sum(x, fma(a[1], v, e))


def mul(a: Expansion, b: Expansion) -> Expansion:
    """(hi, lo) * (hi, lo) as a normalised expansion, wrong by less than 5 u^2 of it, and 2 min_subnormal if it
    underflows.

    The product of the low words is dropped, and the sum of the cross products is rounded at each operation: no
    machine fuses them. The bound is proved for p >= 6 and ties to even; in float8 every pair of significands with
    all their low words keeps it too.

    Raises:
        ValueError: as `two_prod_fma`.

    Source: Collage, Appendix C, Algorithm 7; Joldes, Muller and Popescu, Algorithm 10 (DWTimesDW1, 7 u^2 there);
    Muller and Rideau (5 u^2).
    """
    check_pair("a", a)
    check_pair("b", b)
    check(WIDE, **{"a[0]": a[0], "a[1]": a[1], "b[0]": b[0], "b[1]": b[1]})
    x, e = _two_prod_fma(a[0], b[0])
    return _fast_two_sum(x, add(e, add(times(a[0], b[1]), times(a[1], b[0]))))


def grow(x: Expansion, a: Tensor) -> Expansion:
    """(hi, lo) + a as a normalised expansion, given |hi| >= |a|: wrong by at most 2 u^2 of it, whatever cancels.

    When a is the larger one, the first sum may lose as much as hi itself, and the result is as good as one rounded
    addition: about u. There is no underflow.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Algorithm 1; Joldes, Muller and Popescu, Algorithm 4 (DWPlusFP, which orders nothing and takes
    `two_sum` for the first sum; the same words, given |hi| >= |a|).
    """
    check_pair("x", x)
    check(PRECISION, **{"x[0]": x[0], "x[1]": x[1], "a": a})
    u, v = _fast_two_sum(x[0], a)
    return _fast_two_sum(u, add(x[1], v))


def _fast_two_sum(a: Tensor, b: Tensor) -> Expansion:
    hi = add(a, b)
    return hi, sub(b, sub(hi, a))


def _two_prod_fma(a: Tensor, b: Tensor) -> Expansion:
    hi = times(a, b)
    return hi, product_error(a, b, hi)
