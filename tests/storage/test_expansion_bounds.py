"""The bounds of `scaling`, `mul` and `grow`, walked over significands and low words, against float64.

High words lie in [1, 2), since powers of two come out: all 128 of bf16, with zero and low words of either sign from
the half ulp down to where they no longer matter. Of float8 all expansions there are, its range is too short for
powers of two to come out.

The exact sums and products have at most 53 bits, and float64 holds them; but for those of two bf16 expansions with
tiny low words, which have up to 60, and where float64 is wrong by 2^-37 of the unit that is counted in, u^2.
"""

from collections.abc import Callable

import pytest
import torch
from test_expansion_exact import BF16, FLOAT8, every, in_range, nearest, pairs, significands, take, wide
from torch import Tensor

from narrowgauge.formats import FloatFormat
from narrowgauge.storage import grow, mul, scaling

U = 2.0**-8  # of bf16


def low_words(exponents: tuple[int, ...], fine: tuple[int, ...] = ()) -> Tensor:
    """Low words of a bf16 number in [1, 2): zero, the half ulp 2^-8, extreme and middling significands at each of
    `exponents`, all significands at those of `fine`; both signs."""
    extremes = wide(significands(BF16))[[0, 1, 2, 63, 64, 65, 126, 127]]
    words = [extremes * 2.0**e for e in exponents] + [wide(significands(BF16)) * 2.0**e for e in fine]
    positive = torch.cat([torch.tensor([2.0**-8], dtype=torch.float64), *words])
    return torch.cat([torch.zeros(1, dtype=torch.float64), positive, -positive]).to(BF16)


def loose(hi: Tensor, lo: Tensor) -> Tensor:
    """All of hi: |lo| <= ulp(hi) / 2 is all that is asked."""
    return hi


def normalised(hi: Tensor, lo: Tensor) -> Tensor:
    """Those of hi that are rn(hi + lo), which leaves out 1 with lo < -ulp(1) / 4."""
    return hi[hi + lo == hi]


def worst(words: tuple[Tensor, Tensor], exact: Tensor) -> float:
    """The largest error, in units of u^2 of the exact result; the words are seen to be normalised."""
    assert torch.equal(words[0] + words[1], words[0])
    error = (wide(*words) - exact).abs()
    return float(torch.where(error == 0, 0.0, error / exact.abs()).max()) / U**2


def walk_scaling(lows: Tensor) -> float:
    hi, v = significands(BF16)[:, None], significands(BF16)[None, :]
    return max(worst(scaling((hi, lo), v), wide(hi, lo) * wide(v)) for lo in lows)


def walk_mul(lows: Tensor, kind: Callable[[Tensor, Tensor], Tensor] = normalised) -> float:
    """Half of the pairs of low words, since the product commutes."""
    his = [kind(significands(BF16), lo) for lo in lows]
    found = 0.0
    for i, (hi, lo) in enumerate(zip(his, lows, strict=True)):
        a = hi[:, None]
        for b, other in zip(his[: i + 1], lows[: i + 1], strict=True):
            found = max(found, worst(mul((a, lo), (b, other)), wide(a, lo) * wide(b, other)))
    return found


def walk_grow(lows: Tensor, distances: range, kind: Callable[[Tensor, Tensor], Tensor] = normalised) -> float:
    found = 0.0
    for distance in distances:
        numbers = (wide(significands(BF16)) * 2.0**-distance).to(BF16)
        for lo in lows:
            x, a = pairs(kind(significands(BF16), lo), torch.cat([numbers, -numbers]))
            if distance == 0:
                ordered = wide(x) >= wide(a).abs()
                x, a = take(x, ordered), take(a, ordered)
            found = max(found, worst(grow((x, lo), a), wide(x, lo) + wide(a)))
    return found


EXTREMES = low_words((-9, -10, -11, -13, -16, -19))


def test_scaling_of_all_bf16_significands() -> None:
    """Below 2 u^2, as it is proved for all; 1.77 is the worst of bf16, whichever of the two kinds of low word."""
    assert 1.76 < walk_scaling(low_words((-11, -13, -16, -19), fine=(-9, -10))) < 1.77


def test_mul_of_bf16_significands() -> None:
    """Below 5 u^2. The worst of all is among the extreme low words."""
    assert 4.81 < walk_mul(EXTREMES) < 4.82


def test_grow_of_bf16_significands() -> None:
    """At most 2 u^2; precisely, 2 u^2 / (1 + 2 u), and 2 u^2 / (1 + u) if only |lo| <= ulp(hi) / 2."""
    near = low_words((-9, -10), fine=(-9,))
    assert 1.984 < walk_grow(near, range(1, 3)) <= 2 / (1 + 2 * U)
    assert 1.992 < walk_grow(near, range(2, 3), loose) <= 2 / (1 + U)
    assert walk_grow(EXTREMES, range(18), loose) <= 2 / (1 + U)


@pytest.mark.slow
def test_all_low_words_of_bf16_significands() -> None:
    """Every low word down to 2^-11, and the extreme ones below: the worst cases are those of the short walks."""
    lows = low_words((-12, -13, -14, -16, -19, -22), fine=(-9, -10, -11))
    assert 1.76 < walk_scaling(lows) < 1.77
    assert 1.984 < walk_grow(lows, range(20)) <= 2 / (1 + 2 * U)
    assert 1.992 < walk_grow(lows, range(20), loose) <= 2 / (1 + U)
    assert 4.81 < walk_mul(lows) < 4.82
    assert 4.81 < walk_mul(EXTREMES, loose) < 4.82


def expansions(dtype: torch.dtype, step: int = 1) -> tuple[Tensor, Tensor]:
    """All normalised expansions of positive hi; every so many of them."""
    fmt = FloatFormat.of(dtype)
    numbers = wide(every(dtype)).unique()
    hi, lo = torch.meshgrid(numbers[numbers > 0], numbers, indexing="ij")
    keep = nearest(hi + lo, fmt) == hi
    return hi[keep][::step].to(dtype), lo[keep][::step].to(dtype)


# The worst of each in units of u^2 of the result, where no product underflows.
E4M3, E5M2 = FLOAT8
FLOAT8_WORST = {("scaling", E4M3): 1.237, ("mul", E4M3): 3.484, ("grow", E4M3): 1.766}
FLOAT8_WORST |= {("scaling", E5M2): 1.164, ("mul", E5M2): 2.227, ("grow", E5M2): 1.561}


def float8_worst(words: tuple[Tensor, Tensor], exact: Tensor, first: Tensor, *products: Tensor) -> float:
    """Hold the bound where neither result nor first operation overflows; give the worst without underflow."""
    fmt = FloatFormat.of(words[0].dtype)
    u = 2.0 ** -(fmt.mantissa_bits + 1)
    inside = in_range(first, fmt) & (exact.abs() <= fmt.max)
    error = (wide(*words) - exact).abs()
    # Half a smallest number for each product that underflows, and what rounding adds to it.
    bound, floor = {0: (2.0, 0), 2: (2.0, 1), 3: (5.0, 2)}[len(products)]
    assert bool((error <= bound * u**2 * exact.abs() + floor * fmt.min_subnormal)[inside].all())
    for product in products:
        inside &= (product / fmt.min_subnormal).frac() == 0
    return float(torch.where(inside & (error > 0), error / exact.abs(), 0.0).max()) / u**2


def walk_float8(name: str, dtype: torch.dtype, step: int = 1) -> float:
    """Every expansion with every number, or with every `step`-th expansion."""
    hi, lo = expansions(dtype)
    x, y, found = wide(hi), wide(lo), 0.0
    if name == "mul":
        for a, b in zip(*expansions(dtype, step), strict=True):
            exact, first = (x + y) * wide(a, b), x * wide(a)
            found = max(found, float8_worst(mul((hi, lo), (a, b)), exact, first, first, x * wide(b), y * wide(a)))
        return found
    for v in every(dtype):
        if name == "scaling":
            exact, first = (x + y) * wide(v), x * wide(v)
            found = max(found, float8_worst(scaling((hi, lo), v), exact, first, first, y * wide(v)))
        else:
            ordered = x >= wide(v).abs()
            words = grow((take(hi, ordered), take(lo, ordered)), v)
            found = max(found, float8_worst(words, (x + y + wide(v))[ordered], (x + wide(v))[ordered]))
    return found


@pytest.mark.parametrize(("name", "dtype"), FLOAT8_WORST)
def test_bounds_of_float8_expansions(name: str, dtype: torch.dtype) -> None:
    worst_of_all = FLOAT8_WORST[name, dtype]
    if name == "mul":
        assert walk_float8(name, dtype, step=301) <= worst_of_all
    else:
        assert worst_of_all - 0.001 < walk_float8(name, dtype) <= worst_of_all


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOAT8)
def test_mul_of_all_float8_expansions(dtype: torch.dtype) -> None:
    assert FLOAT8_WORST["mul", dtype] - 0.001 < walk_float8("mul", dtype) <= FLOAT8_WORST["mul", dtype]
