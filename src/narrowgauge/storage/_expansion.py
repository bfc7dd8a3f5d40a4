"""Multi-component floats: numbers kept as the unevaluated sum of two narrow ones.

The sum of two floats is rarely a float, but the *error* of their rounded sum always is one, and so is that of
their product unless it is too small. Keeping both words (hi, lo), hi the rounded value and lo what rounding cut
off, holds twice the digits by the narrow format's own operations. Four functions are exact, `fast_two_sum`,
`two_sum`, `two_prod`, `two_prod_fma`; three compute with expansions, `grow` (+ number), `scaling` (* number) and
`mul` (* expansion), and are wrong by a few u^2, where one rounding of the format is wrong by u = 2^-p.

Tensors are of one dtype among bfloat16, float16, float32, float8_e4m3fn and float8_e5m2 (float64 for the sums,
`split` and `two_prod`) and of shapes that broadcast. Every operation is rounded to the format once, to nearest,
ties to even; p counts the hidden bit: 8, 11, 24, 4, 3. An expansion is *normalized* when hi = rn(hi + lo), so that
|lo| <= ulp(hi) / 2. Every function returns such a pair under its conditions, and those that take one expect one.

Conditions common to all: no operation overflows. If one does, words are infinite or NaN; e4m3 has no infinity,
its operations stop at 448 and nothing tells, so that it is for the caller to stay below. Sums have no underflow,
an inexact one being far above the smallest number. Products do: where a b is no multiple of min_subnormal its
error is no number of the format, and each such product adds up to min_subnormal / 2 to the errors stated. It cannot
happen from |a b| >= 2^p min_normal upwards.

The bounds are proved, in docs/expansions.md or where it says; tests hold every function against them, and the
figures of that page are what they measured.

**The operations of a format** are computed as if exactly, then rounded once to nearest, ties to even. The
algorithms on expansions are built of nothing else, and their proofs assume nothing else. Where torch has an
operation it is the rounded one: it computes bf16 and fp16 in float32 and rounds the result, and rounding twice
gives what rounding once does when the wider format has at least 2p + 2 significant bits (Figueroa 1995), here 24 >=
2 * 11 + 2. What that argument leaves out, results among the subnormal numbers, is exact in float32 wherever it does
not round to zero. Float8 tensors have no arithmetic in torch; theirs goes the same way, 24 >= 2 * 4 + 2, by
`round_to`, which also says what becomes of an overflow: infinity, or the largest number where e4m3 has none.

A fused multiply-add sums a product of 2p bits and a number far from it, so that no fixed width is enough: it is
summed in float64 and rounded *to odd* there, which keeps the last bit as a record that something was cut off.

Source: Collage, Section 4.1 and Appendix C; Dekker 1971 for Fast2Sum and TwoProd, Moller and Knuth for TwoSum,
Veltkamp for Split; Joldes, Muller and Popescu, Tight and rigorous error bounds for basic building blocks of
double-word arithmetic, ACM TOMS 44(2), 2017, and Muller and Rideau, Formalization of double-word arithmetic, ACM
TOMS 48(1), 2022, for `grow`, `scaling` and `mul`, which are their DWPlusFP, DWTimesFP3 and DWTimesDW1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from narrowgauge._torch_private import uncompiled
from narrowgauge.formats import FloatFormat, round_to

Expansion = tuple[Tensor, Tensor]

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})

# A product of two numbers of the key is exact in the value, 2p <= p', down to where its rounded value is zero.
_WIDE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}

# Significant bits p, the hidden one counted.
_PRECISION = {torch.float64: 53} | {dtype: FloatFormat.of(dtype).mantissa_bits + 1 for dtype in _WIDE}


@uncompiled
def fast_two_sum(a: Tensor, b: Tensor) -> Expansion:
    """a + b = hi + lo exactly, given |a| >= |b|, or a = 0, or any a that is a multiple of ulp(b); three operations.

    Otherwise hi is still rn(a + b), and hi + lo is wrong by no more than |a|, nor than ulp(hi) / 2.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Theorem 4.1 (Dekker 1971).
    """
    _check(_PRECISION, a=a, b=b)
    return _fast_two_sum(a, b)


@uncompiled
def two_sum(a: Tensor, b: Tensor) -> Expansion:
    """a + b = hi + lo exactly for any order of magnitudes; six operations.

    Numbers up to max / 2 cannot overflow. Beyond, hi - a may where hi does not.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Appendix C, Algorithm 2 (Moller 1965, Knuth).
    """
    _check(_PRECISION, a=a, b=b)
    hi = _add(a, b)
    b_virtual = _sub(hi, a)
    a_virtual = _sub(hi, b_virtual)
    return hi, _add(_sub(a, a_virtual), _sub(b, b_virtual))


@uncompiled
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
    _check(_PRECISION, a=a)
    t = _scale(a, 2.0 ** -(-_PRECISION[a.dtype] // 2) + 1)
    hi = _sub(t, _sub(t, a))
    return hi, _sub(a, hi)


@uncompiled
def two_prod(a: Tensor, b: Tensor) -> Expansion:
    """a * b = hi + lo exactly, if a * b is a multiple of min_subnormal; 17 operations of the format.

    No overflow means here that `split` takes a and b, and |a b| <= max / 2.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Appendix C, Algorithm 4 (Dekker 1971), whose `p` is the rounded product, here hi.
    """
    _check(_PRECISION, a=a, b=b)
    hi = _times(a, b)
    (a_hi, a_lo), (b_hi, b_lo) = split(a), split(b)
    error = _sub(_sub(_sub(hi, _times(a_hi, b_hi)), _times(a_lo, b_hi)), _times(a_hi, b_lo))
    return hi, _sub(_times(a_lo, b_lo), error)


@uncompiled
def two_prod_fma(a: Tensor, b: Tensor) -> Expansion:
    """a * b = hi + lo exactly if a * b is a multiple of min_subnormal; else lo is the nearest number to the error.

    The fused multiply-add is taken in a format that holds the product exactly, and rounded once.

    Raises:
        ValueError: for tensors that are not of one float dtype, or of float64, for which torch has no wider format
            (`two_prod` takes it).

    Source: Collage, Appendix C, Algorithm 5.
    """
    _check(_WIDE, a=a, b=b)
    return _two_prod_fma(a, b)


@uncompiled
def scaling(a: Expansion, v: Tensor) -> Expansion:
    """(hi, lo) * v as a normalized expansion, wrong by less than 2 u^2 of it, and min_subnormal if it underflows.

    Line 3 of the algorithm is one fused multiply-add, as its notation has it and as in line 4 of Algorithm 5;
    with a product and a sum rounded apart the bound would be 3 u^2.

    Raises:
        ValueError: as `two_prod_fma`.

    Source: Collage, Appendix C, Algorithm 6; Joldes, Muller and Popescu, Algorithm 9 (DWTimesFP3).
    """
    _check_pair("a", a)
    _check(_WIDE, **{"a[0]": a[0], "a[1]": a[1], "v": v})
    x, e = _two_prod_fma(a[0], v)
    return _fast_two_sum(x, _fma(a[1], v, e))


@uncompiled
def mul(a: Expansion, b: Expansion) -> Expansion:
    """(hi, lo) * (hi, lo) as a normalized expansion, wrong by less than 5 u^2 of it, and 2 min_subnormal if it
    underflows.

    The product of the low words is dropped, and the sum of the cross products is rounded at each operation: no
    machine fuses them. The bound is proved for p >= 6 and ties to even; in float8 every pair of significands with
    all their low words keeps it too.

    Raises:
        ValueError: as `two_prod_fma`.

    Source: Collage, Appendix C, Algorithm 7; Joldes, Muller and Popescu, Algorithm 10 (DWTimesDW1, 7 u^2 there);
    Muller and Rideau (5 u^2).
    """
    _check_pair("a", a)
    _check_pair("b", b)
    _check(_WIDE, **{"a[0]": a[0], "a[1]": a[1], "b[0]": b[0], "b[1]": b[1]})
    x, e = _two_prod_fma(a[0], b[0])
    return _fast_two_sum(x, _add(e, _add(_times(a[0], b[1]), _times(a[1], b[0]))))


@uncompiled
def grow(x: Expansion, a: Tensor) -> Expansion:
    """(hi, lo) + a as a normalized expansion, given |hi| >= |a|: wrong by at most 2 u^2 of it, whatever cancels.

    When a is the larger one, the first sum may lose as much as hi itself, and the result is as good as one rounded
    addition: about u. There is no underflow.

    Raises:
        ValueError: for tensors that are not of one float dtype.

    Source: Collage, Algorithm 1; Joldes, Muller and Popescu, Algorithm 4 (DWPlusFP, which orders nothing and takes
    `two_sum` for the first sum; the same words, given |hi| >= |a|).
    """
    _check_pair("x", x)
    _check(_PRECISION, **{"x[0]": x[0], "x[1]": x[1], "a": a})
    u, v = _fast_two_sum(x[0], a)
    return _fast_two_sum(u, _add(x[1], v))


def _fast_two_sum(a: Tensor, b: Tensor) -> Expansion:
    hi = _add(a, b)
    return hi, _sub(b, _sub(hi, a))


def _two_prod_fma(a: Tensor, b: Tensor) -> Expansion:
    hi = _times(a, b)
    return hi, _product_error(a, b, hi)


def _rounded(operation: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """rn(operation(a, b))."""
    return _round(operation(_wide(a), _wide(b)), a.dtype) if a.dtype in _FLOAT8 else operation(a, b)


_add, _sub, _times = (partial(_rounded, operation) for operation in (operator.add, operator.sub, operator.mul))


def _scale(a: Tensor, factor: float) -> Tensor:
    """rn(factor a), the factor a number of the format."""
    return _round(_wide(a) * factor, a.dtype) if a.dtype in _FLOAT8 else a * factor


def _product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """rn(a b - product), the fused multiply-add of a product and its rounded value: the wide sum is exact."""
    error = _wide(a) * _wide(b) - _wide(product)
    return _round(error, a.dtype) if a.dtype in _FLOAT8 else error.to(a.dtype)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """rn(a b + c), one rounding, for any c; of formats with 2p <= 53.

    Rounding to odd with two bits to spare leaves the rounding that follows as if it were the only one.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE Trans. Computers 57(4), 2008.
    """
    product = a.to(torch.float64) * b.to(torch.float64)
    term = c.to(torch.float64)
    total = product + term
    virtual = total - product
    error = (product - (total - virtual)) + (term - virtual)
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    # An overflow has NaN for its error and stays as it is.
    inexact = (error < 0) | (error > 0)
    odd = torch.where(inexact & (bits & 1 == 0), bits + step, bits).view(torch.float64)
    return _round(odd, a.dtype)


def _check(takes: Collection[torch.dtype], **operands: Tensor) -> None:
    """Refuse operands, by their arguments' names, that are not tensors of one dtype among those taken."""
    names = {name: getattr(operand, "dtype", type(operand).__name__) for name, operand in operands.items()}
    first, dtype = next(iter(names.items()))
    if dtype not in takes:
        known = [str(known).removeprefix("torch.") for known in takes]
        raise ValueError(f"{first} must be a tensor of {', '.join(known[:-1])} or {known[-1]}, got {dtype}")
    for name, other in names.items():
        if other != dtype:
            raise ValueError(f"{name} must be of {dtype}, the dtype of {first}, got {other}")


def _check_pair(name: str, pair: object) -> None:
    """Refuse what is not an expansion's two words: a tensor would be taken apart along its first side."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{name} must be a pair of tensors, hi and lo, got {type(pair).__name__}")


def _wide(a: Tensor) -> Tensor:
    return a.to(_WIDE[a.dtype])


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return round_to(x, FloatFormat.of(dtype))
