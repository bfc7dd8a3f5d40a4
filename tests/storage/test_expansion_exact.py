"""Every pair of numbers, or of significands, through the error-free sums and products, against float64.

Float8 has 256 codes: all pairs are walked. Bf16 and fp16 are walked by significands: rounding, and with it every
algorithm here, commutes with powers of two where nothing overflows or underflows, so that all pairs of significands
at all distances of their exponents are all pairs of numbers. Distances end where the smaller number is below a
quarter of the larger one's last place: further down it moves nothing. The ends of the range are walked apart.

Float64 is the oracle where it is exact, by counting bits: sums and products of the numbers below span at most
    e5m2     2^16 down to 2^-16 for sums, 2^32 down to 2^-32 for products, 48 bits for the sum of one of each
    bf16     8 bits at a distance of 10, or subnormals and 8 binades above: under 20 bits; 16 bits for products
    fp16     11 bits at a distance of 13: 24 bits; 22 bits for products
all within 53.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.formats import FloatFormat
from narrowgauge.storage import _expansion as rounded
from narrowgauge.storage import fast_two_sum, split, two_prod, two_prod_fma, two_sum

BF16, FP16 = torch.bfloat16, torch.float16
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
CODES = {1: torch.uint8, 2: torch.int16}


def every(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a format of 8 or 16 bits."""
    codes = torch.arange(1 << 8 * dtype.itemsize).to(CODES[dtype.itemsize])
    return codes[torch.isfinite(codes.view(dtype).to(torch.float64))].view(dtype)


def pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Each of a with each of b."""
    codes = CODES[a.dtype.itemsize]
    return a.view(codes).repeat_interleave(len(b)).view(a.dtype), b.view(codes).repeat(len(a)).view(b.dtype)


def significands(dtype: torch.dtype) -> Tensor:
    """All numbers of [1, 2)."""
    bits = FloatFormat.of(dtype).mantissa_bits
    return (1 + torch.arange(1 << bits, dtype=torch.float64) / (1 << bits)).to(dtype)


def wide(*words: Tensor) -> Tensor:
    return sum((word.to(torch.float64) for word in words[1:]), words[0].to(torch.float64))


def half_ulp(hi: Tensor) -> Tensor:
    return FloatFormat.of(hi.dtype).ulp(wide(hi)) / 2


def in_range(exact: Tensor, fmt: FloatFormat) -> Tensor:
    """What rounds to a finite number by its own right."""
    return exact.abs() < fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2))


def nearest(exact: Tensor, fmt: FloatFormat) -> Tensor:
    """Ties to even by float64's own rounding to whole numbers, of multiples of the last place."""
    ulp = fmt.ulp(exact)
    whole = (exact / ulp).round() * ulp
    return torch.where(whole.abs() > fmt.max, torch.copysign(torch.full_like(whole, torch.inf), whole), whole)


def take(a: Tensor, where: Tensor) -> Tensor:
    """Masked selection, which torch has not for float8."""
    return a.view(CODES[a.dtype.itemsize])[where].view(a.dtype)


def lattice(dtype: torch.dtype, distances: range, step: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (a, b): significands, b times 2^-distance and either sign. `step` thins both, keeping the last."""
    keep = torch.arange((1 << FloatFormat.of(dtype).mantissa_bits) - 1, -1, -step)
    numbers = significands(dtype)[keep]
    for distance in distances:
        b = (wide(numbers) * 2.0**-distance).to(dtype)
        yield pairs(numbers, torch.cat([b, -b]))


# The rounded operations


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_torch_rounds_each_operation_once(dtype: torch.dtype) -> None:
    """Significands at all distances, around the smallest normal number, and up to overflow."""
    fmt = FloatFormat.of(dtype)
    step = 1 if dtype == BF16 else 17
    lowest = every(dtype)[: 1 << fmt.mantissa_bits + 2 : step]
    highest = every(dtype)[: len(every(dtype)) // 2][-(2 << fmt.mantissa_bits) :: step]
    cases = [
        *lattice(dtype, range(16), step),
        pairs(lowest, -lowest),
        pairs(lowest, lowest),
        pairs(highest, highest),
    ]
    for exponent in range(-fmt.mantissa_bits - 3, 3):  # products around the smallest numbers
        tiny = (wide(significands(dtype)[::step]) * 2.0 ** (exponent // 2)).to(dtype)
        cases.append(pairs(tiny, (wide(tiny) * 2.0 ** (fmt.min_exponent - exponent // 2)).to(dtype)))
    for a, b in cases:
        x, y = wide(a), wide(b)
        assert torch.equal(wide(rounded._add(a, b)), nearest(x + y, fmt))
        assert torch.equal(wide(rounded._sub(a, b)), nearest(x - y, fmt))
        product = rounded._times(a, b)
        assert torch.equal(wide(product), nearest(x * y, fmt))
        finite = product.isfinite()
        error = rounded._product_error(a, b, product)
        assert torch.equal(wide(error)[finite], nearest(x * y - wide(product), fmt)[finite])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_fused_operation_rounds_once(dtype: torch.dtype) -> None:
    """Terms at all distances of the product, above and below."""
    fmt = FloatFormat.of(dtype)
    a, b = next(lattice(dtype, range(1), 5 if dtype == BF16 else 61))
    for distance in range(-14, 26):
        c = (wide(a.flip(0)) * 2.0**-distance).to(dtype)
        assert torch.equal(wide(rounded._fma(a, b, c)), nearest(wide(a) * wide(b) + wide(c), fmt))


def nearest_of_table(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounding by search among all numbers, with nothing of the library but the codes."""
    magnitudes = wide(torch.arange(128, dtype=torch.uint8).view(dtype)).numpy()
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    # A middle belongs to the even code of its two neighbors.
    middles = np.where(np.arange(len(middles)) % 2 == 0, middles, np.nextafter(middles, 0.0))
    index = np.searchsorted(middles, x.abs().numpy(), side="left")
    return torch.copysign(torch.from_numpy(magnitudes[index]), x)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_operations_round_once(dtype: torch.dtype) -> None:
    """All pairs; for the fused operation all pairs of factors and a third of the terms."""
    fmt = FloatFormat.of(dtype)

    def rounds(got: Tensor, exact: Tensor) -> None:
        inside = in_range(exact, fmt)
        assert torch.equal(wide(got)[inside], nearest_of_table(exact[inside], dtype))

    a, b = pairs(every(dtype), every(dtype))
    x, y = wide(a), wide(b)
    rounds(rounded._add(a, b), x + y)
    rounds(rounded._sub(a, b), x - y)
    rounds(rounded._times(a, b), x * y)
    inside = in_range(x * y, fmt)
    a, b, x, y = take(a, inside), take(b, inside), x[inside], y[inside]
    product = rounded._times(a, b)
    rounds(rounded._product_error(a, b, product), x * y - wide(product))
    half = (x >= y) & (y >= 0)
    a, b, x, y = take(a, half), take(b, half), x[half], y[half]
    for c in take(every(dtype), torch.arange(len(every(dtype))) % 3 == 0):
        rounds(rounded._fma(a, b, c), x * y + wide(c))


# Exact sums and products


def sums_are_exact(a: Tensor, b: Tensor) -> None:
    fmt = FloatFormat.of(a.dtype)
    x, y = wide(a), wide(b)
    inside = in_range(x + y, fmt)
    a, b, x, y = take(a, inside), take(b, inside), x[inside], y[inside]
    hi, lo = two_sum(a, b)
    assert torch.equal(wide(hi), nearest(x + y, fmt))
    exact = wide(hi, lo) == x + y
    # No operation may overflow; hi - a is the only one that can where hi has not.
    assert bool(exact[in_range(wide(hi) - x, fmt)].all())
    assert bool(exact[(x.abs() <= fmt.max / 2) & (y.abs() <= fmt.max / 2)].all())
    assert bool((wide(lo).abs() <= half_ulp(hi))[exact].all())
    hi, lo = fast_two_sum(a, b)
    assert torch.equal(wide(hi), nearest(x + y, fmt))
    error = (wide(hi, lo) - (x + y)).abs()
    ordered = (x.abs() >= y.abs()) | (x == 0) | ((x / fmt.ulp(y)).frac() == 0)
    assert not error[ordered].any()
    # Out of order: never wrong by more than a, nor than hi alone.
    rest = ~ordered & in_range(wide(hi) - x, fmt)
    assert bool((error <= torch.minimum(x.abs(), half_ulp(hi)))[rest].all())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_sums_of_all_float8_pairs(dtype: torch.dtype) -> None:
    sums_are_exact(*pairs(every(dtype), every(dtype)))


def test_two_sum_of_the_largest_e5m2_numbers_overflows_within() -> None:
    """The one exception among all pairs: hi is finite and hi - a is not. In the other order nothing overflows."""
    a, b = (torch.tensor(x).to(torch.float8_e5m2) for x in (12288.0, -57344.0))
    hi, lo = two_sum(a, b)
    assert float(hi) == -49152.0
    assert not np.isfinite(float(lo))
    for hi, lo in (two_sum(b, a), fast_two_sum(b, a)):
        assert float(hi) + float(lo) == 12288.0 - 57344.0


def test_sums_of_all_bf16_significands() -> None:
    for a, b in lattice(BF16, range(11)):
        sums_are_exact(a, b)
        sums_are_exact(b, a)
    lowest = every(BF16)[:1024]
    sums_are_exact(*pairs(lowest, torch.cat([lowest, -lowest])))
    highest = every(BF16)[0x7F80 - 1024 : 0x7F80]
    sums_are_exact(*pairs(highest, -highest))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_sums_of_fp16_significands(step: int) -> None:
    for a, b in lattice(FP16, range(14), step):
        sums_are_exact(a, b)


def products_are_exact(a: Tensor, b: Tensor) -> None:
    fmt = FloatFormat.of(a.dtype)
    p = fmt.mantissa_bits + 1
    inside = in_range(wide(a) * wide(b), fmt)
    a, b = take(a, inside), take(b, inside)
    x, y = wide(a), wide(b)
    product = x * y
    multiple = (product / fmt.min_subnormal).frac() == 0
    assert bool(multiple[product.abs() >= 2.0**p * fmt.min_normal].all())
    hi, lo = two_prod_fma(a, b)
    assert torch.equal(wide(hi), nearest(product, fmt))
    assert torch.equal(wide(lo), nearest(product - wide(hi), fmt))
    assert torch.equal(wide(hi, lo) == product, multiple)
    largest = fmt.max / (2.0 ** -(-p // 2) + 1)
    within = (x.abs() <= largest) & (y.abs() <= largest) & (product.abs() <= fmt.max / 2)
    hi, lo = two_prod(a, b)
    assert torch.equal(wide(hi), nearest(product, fmt))
    assert torch.equal((wide(hi, lo) == product)[within], multiple[within])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_products_of_all_float8_pairs(dtype: torch.dtype) -> None:
    products_are_exact(*pairs(every(dtype), every(dtype)))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_of_all_significands(dtype: torch.dtype) -> None:
    products_are_exact(*pairs(significands(dtype), significands(dtype)))


def test_products_of_all_bf16_significands_around_underflow() -> None:
    """A product of 2^e has its last bit at 2^(e - 14), the format at 2^-133."""
    for exponent in range(-150, -110, 3):
        a = (wide(significands(BF16)) * 2.0 ** (exponent // 2)).to(BF16)
        b = (wide(significands(BF16)) * 2.0 ** (exponent - exponent // 2)).to(BF16)
        products_are_exact(*pairs(a, b))


@pytest.mark.parametrize("dtype", [*FLOAT8, BF16, FP16])
def test_split_of_every_number(dtype: torch.dtype) -> None:
    fmt = FloatFormat.of(dtype)
    p = fmt.mantissa_bits + 1
    c = -(-p // 2)
    a = every(dtype)
    a = take(a, wide(a).abs() <= fmt.max / (2**c + 1))
    hi, lo = split(a)
    assert torch.equal(wide(hi, lo), wide(a))
    for word, bits in ((hi, p - c), (lo, c - 1)):
        x = wide(word)
        # x is a multiple of a power of two within `bits` bits of its first.
        first = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
        assert bool(((x == 0) | ((x / first * 2.0 ** (bits - 1)).frac() == 0)).all())
