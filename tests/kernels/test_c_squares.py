"""The compiled pass over a gradient: sums of squares, the largest magnitude, what is not finite."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.kernels._c_library import Unavailable, load
from narrowgauge.kernels._c_squares import sums_of_squares

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 15, 16, 17, 4095, 4096, 4097, 5 * 4096 + 1030, 70_001]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        load("int one(void) { return 1; }")
    except Unavailable as reason:
        pytest.skip(f"no compiled function: {reason}")


def gradient(length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    scale = 10.0 ** torch.empty(length).uniform_(-6, 4, generator=generator)
    return (torch.randn(length, generator=generator) * scale).to(dtype)


def squares(grad: Tensor) -> tuple[float, float]:
    """The sum and the largest magnitude of one gradient, in a list of three."""
    found = sums_of_squares([torch.ones(3), grad, torch.ones(5, dtype=torch.float16)])
    assert found is not None
    sums, peaks = found
    assert (sums[0], sums[2], peaks[0], peaks[2]) == (3.0, 5.0, 1.0, 1.0)
    return float(sums[1]), float(peaks[1])


def lanes(grad: Tensor) -> float:
    """Sixteen sums of each stretch of 4096 elements, in order, and all of them one after the other, in float64."""
    exact = np.zeros(-(-grad.numel() // 4096) * 4096)
    exact[: grad.numel()] = grad.double().square().numpy()
    sums = np.cumsum(exact.reshape(-1, 256, 16), axis=1)[:, -1]
    return float(np.cumsum(sums, axis=1)[:, -1].sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_those_of_float64_and_near_the_exact_ones(dtype: torch.dtype, length: int) -> None:
    grad = gradient(length, dtype)
    found = squares(grad)
    assert found == (lanes(grad), grad.abs().max().item())
    exact = sum(Fraction(x) ** 2 for x in grad.double().tolist())
    # 256 additions in a lane, sixteen lanes, stretches one after the other: half an ulp each at most.
    assert abs(Fraction(found[0]) - exact) <= exact * Fraction(256 + 16 + length // 4096 + 1, 2**53)


def test_threads_and_places_change_no_bit() -> None:
    whole = gradient(300_001, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for offset in range(3):
                moved = torch.empty(len(whole) + 3, dtype=torch.bfloat16)[offset : offset + len(whole)]
                found.add(squares(moved.copy_(whole)))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    for place, bad in itertools.product((0, 20, 4096, 70_000), (math.inf, -math.inf, math.nan, -math.nan)):
        grad = gradient(70_001, dtype)
        grad[place] = bad
        found = squares(grad)
        assert math.isnan(found[0]) if math.isnan(bad) else found == (math.inf, math.inf)
    assert squares(torch.full((70_001,), -0.0, dtype=dtype)) == (0.0, 0.0)
