"""Multi-component floats against exact arithmetic (fractions of integers, or float64 where that is exact)."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.formats import FloatFormat
from narrowgauge.storage import fast_two_sum, grow, mul, scaling, split, two_prod, two_prod_fma, two_sum

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def numbers(dtype: torch.dtype, low: float = 2.0**-6, high: float = 2.0**6) -> st.SearchStrategy[torch.Tensor]:
    """Numbers of the format, away from its overflow and underflow, and zero."""
    magnitude = st.floats(low, high).map(lambda x: torch.tensor(x, dtype=torch.float64).to(dtype))
    signed = st.tuples(magnitude, st.booleans()).map(lambda pair: -pair[0] if pair[1] else pair[0])
    return st.one_of(signed, st.just(torch.zeros((), dtype=dtype)))


def value(*words: torch.Tensor) -> Fraction:
    return sum((Fraction(float(word)) for word in words), Fraction(0))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_sums_are_exact(dtype: torch.dtype, data: st.DataObject) -> None:
    a, b = data.draw(numbers(dtype)), data.draw(numbers(dtype))
    assert value(*two_sum(a, b)) == value(a, b)
    if abs(a) < abs(b):
        a, b = b, a
    hi, lo = fast_two_sum(a, b)
    assert value(hi, lo) == value(a, b)
    assert abs(float(lo)) <= float(FloatFormat.of(dtype).ulp(hi.to(torch.float64))) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_products_and_splits_are_exact(dtype: torch.dtype, data: st.DataObject) -> None:
    # A product's low word must not fall below fp16's smallest number.
    a, b = data.draw(numbers(dtype, 0.25, 16.0)), data.draw(numbers(dtype, 0.25, 16.0))
    exact = Fraction(float(a)) * Fraction(float(b))
    assert value(*two_prod_fma(a, b)) == exact
    assert value(*two_prod(a, b)) == exact
    hi, lo = split(a)
    assert value(hi, lo) == value(a)
    half = math.ceil(BITS[dtype] / 2)
    for word in (hi, lo):
        mantissa = Fraction(float(word))
        while mantissa.denominator > 1:
            mantissa *= 2
        integer = abs(mantissa.numerator)
        assert integer == 0 or (integer // (integer & -integer)).bit_length() <= half


def test_two_prod_of_all_bf16_significands_is_exact() -> None:
    """Every pair of the 128 significands: with the paper's floor(p / 2) a seventh of them fails."""
    significands = (torch.arange(128) + 0x3F80).to(torch.int16).view(torch.bfloat16)
    a, b = (x.reshape(-1) for x in torch.meshgrid(significands, significands, indexing="ij"))
    exact = a.to(torch.float64) * b.to(torch.float64)
    for hi, lo in (two_prod(a, b), two_prod_fma(a, b)):
        assert torch.equal(hi.to(torch.float64) + lo.to(torch.float64), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_grow_mul_and_scaling_keep_nearly_twice_the_bits(dtype: torch.dtype, data: st.DataObject) -> None:
    u = Fraction(2) ** -BITS[dtype]
    pairs = []
    for _ in range(2):
        hi = data.draw(numbers(dtype, 0.5, 8.0))
        lo = (hi.to(torch.float64) * data.draw(st.floats(-0.5, 0.5)) * float(u)).to(dtype)
        pairs.append(fast_two_sum(hi, lo))
    (x, y), other = pairs
    a = (x.to(torch.float64) * data.draw(st.floats(-1.0, 1.0))).to(dtype)
    # Grow adds y to the error of x + a, rounded, then sums: 2 u^2 of |x| + |a| holds for the result's error.
    grown = value(*grow((x, y), a)) - value(x, y, a)
    assert abs(grown) <= 2 * u * u * (abs(value(x)) + abs(value(a)))
    # Products may lose what lies below the format's smallest number (fp16's 2^-24).
    floor = 2 * Fraction(FloatFormat.of(dtype).min_subnormal)
    # Mul drops the product of the low words and rounds four times at the level of the error: 7 u^2.
    product = value(x, y) * value(*other)
    assert abs(value(*mul((x, y), other)) - product) <= 7 * u * u * abs(product) + floor
    scaled = value(x, y) * value(a)
    assert abs(value(*scaling((x, y), a)) - scaled) <= 4 * u * u * abs(scaled) + floor


def test_betas_as_bf16_expansions_are_those_of_table_1() -> None:
    """Collage, Table 1: the second word mends what the first cannot say."""
    for beta, hi_wanted in ((0.999, 1.0), (0.99, 0.98828125), (0.95, 0.94921875)):
        hi = torch.tensor(beta, dtype=torch.float64).to(torch.bfloat16)
        lo = (torch.tensor(beta, dtype=torch.float64) - hi.to(torch.float64)).to(torch.bfloat16)
        assert float(hi) == hi_wanted
        assert abs(float(hi) + float(lo) - beta) < 2.0**-17


def test_dtypes_without_the_arithmetic_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a: got torch\.float8_e4m3fn"):
        split(torch.ones(1).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"a: got torch\.float64"):
        two_prod_fma(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
