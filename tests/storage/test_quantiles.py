"""Estimated quantiles: exact where they can be, close elsewhere, and with the symmetries of quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from narrowgauge.storage import _quantiles, estimate_quantiles
from pairwise import cases


def probabilities(count: int = 256) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


def exact(x: Tensor, count: int = 256) -> Tensor:
    return torch.from_numpy(np.quantile(x.double().numpy().ravel(), probabilities(count), method="hazen"))


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def misplaced(x: Tensor, count: int = 256) -> np.ndarray:
    """F(estimate) - p, with F the data's own distribution function."""
    ordered, found = np.sort(x.numpy()), estimate_quantiles(x, count).numpy()
    sides = [np.searchsorted(ordered, found, side) for side in ("left", "right")]
    return (sides[0] + sides[1]) / (2 * len(ordered)) - probabilities(count)


def members(size: int) -> list[Tensor]:
    """The flat indices of each subset, from the published rule, one at a time."""
    subsets = math.ceil(size / 4096)
    found: list[list[int]] = [[] for _ in range(subsets)]
    for stripe in range(256):
        bits = stripe
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ bits >> shift) * factor % 2**32
        bits ^= bits >> 16
        for subset in range(subsets):
            first = 16 * (stripe * subsets + (subset + bits * subsets // 2**32) % subsets)
            found[subset] += range(min(first, size), min(first + 16, size))
    return [torch.tensor(indices) for indices in found]


@pytest.mark.parametrize(("size", "count"), cases([1, 2, 3, 16, 17, 255, 4095, 4096], [1, 2, 7, 256, 4096]))
def test_one_subset_is_exact(size: int, count: int) -> None:
    x = normal(size)
    torch.testing.assert_close(estimate_quantiles(x, count).double(), exact(x, count), rtol=2.0**-23, atol=1e-7)


@pytest.mark.parametrize("size", [4097, 8192, 12345, 100_000, 2**17])
def test_it_is_the_mean_over_subsets(size: int) -> None:
    x, parts = normal(size), members(size)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 16
    wanted = torch.stack([exact(x[part]) for part in parts]).mean(0)
    torch.testing.assert_close(estimate_quantiles(x).double(), wanted, rtol=1e-6, atol=1e-6)


def test_more_subsets_than_rows_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(23 * 4096 + 100)
    plain = estimate_quantiles(x)
    monkeypatch.setattr(_quantiles, "_ROWS", 6)
    monkeypatch.setattr(_quantiles, "_CHUNK", 3)
    torch.testing.assert_close(estimate_quantiles(x), plain, rtol=2.0**-23, atol=0)


DATA = {
    "normal": normal,
    "uniform": lambda size: torch.rand(size, generator=torch.Generator().manual_seed(0)),
    "squares": lambda size: normal(size).square(),
    "heavy tails": lambda size: normal(size) / normal(size, seed=1),
    "sorted": lambda size: normal(size).sort().values,
    "sorted downwards": lambda size: normal(size).sort(descending=True).values,
}


@pytest.mark.parametrize("name", DATA)
def test_the_error_is_a_small_part_of_the_spacing(name: str) -> None:
    """Spacing is 1/256 = 3.9e-3. The bias of Hazen's rule is (1/2 - p) / 4097, the noise 0.5 / sqrt(n)."""
    off = np.abs(misplaced(DATA[name](2**20)))
    assert off.mean() < 2e-4
    assert off.max() < 8e-4


@pytest.mark.parametrize("period", [16, 100, 1024, 4096, 65536])
def test_no_period_lines_up_with_the_subsets(period: int) -> None:
    """Means that move by four deviations within a period; a fourth of the spacing is allowed."""
    assert np.abs(misplaced(normal(2**20) + torch.arange(2**20) % period * (4 / period))).mean() < 1e-3


def test_neighbors_of_one_kind_do_little_harm() -> None:
    """Rows of scales over six decades, where subsets of neighbors are off by 0.09 on average."""
    scales = 10 ** (6 * torch.rand(1024, 1, generator=torch.Generator().manual_seed(1)) - 3)
    off = np.abs(misplaced((normal(2**20).view(1024, 1024) * scales).reshape(-1)))
    assert off.mean() < 5e-3
    assert off.max() < 1.2e-2


@given(st.integers(1, 20_000), st.integers(1, 4096), st.integers(-60, 60), st.integers(0, 2**31))
def test_symmetries(size: int, count: int, exponent: int, seed: int) -> None:
    x = normal(size, seed)
    found = estimate_quantiles(x, count)
    assert found.shape == (count,)
    assert (found.diff() >= 0).all()
    assert x.min() <= found[0]
    assert found[-1] <= x.max()
    assert torch.equal(estimate_quantiles(x * 2.0**exponent, count), found * 2.0**exponent)
    assert torch.equal(estimate_quantiles(-x, count), -found.flip(0))


def test_it_is_the_same_in_every_run_and_with_any_number_of_threads() -> None:
    x, threads = normal(300_000), torch.get_num_threads()
    found = estimate_quantiles(x)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(estimate_quantiles(x), found)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_is_its_float32_values(dtype: torch.dtype) -> None:
    x = normal(10_000).to(dtype)
    found = estimate_quantiles(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, estimate_quantiles(x.to(torch.float32)))
    x = x.view(100, 100)  # of any shape and layout
    assert torch.equal(estimate_quantiles(x), found)
    assert torch.equal(estimate_quantiles(x.t()), estimate_quantiles(x.t().contiguous()))


@pytest.mark.parametrize("size", [100, 4096, 50_000])
@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_a_nan_makes_all_nan(size: int, nan: float) -> None:
    for place in (0, size - 1):
        x = normal(size)
        x[place] = nan
        assert estimate_quantiles(x).isnan().all()


def test_infinities_are_outermost_values() -> None:
    x = normal(50_000)
    plain = estimate_quantiles(x)
    x[[7, 30_000]] = torch.tensor([torch.inf, -torch.inf])
    found = estimate_quantiles(x)
    # The outermost quantiles are read eight elements from the ends.
    assert found.isfinite().all()
    torch.testing.assert_close(found, plain, rtol=0, atol=0.05)
    infinite = torch.tensor([-torch.inf, -torch.inf, 0.0, 0.0, torch.inf, torch.inf])
    assert estimate_quantiles(infinite, 3).tolist() == [-torch.inf, 0.0, torch.inf]


def test_the_largest_values_do_not_overflow_and_zero_has_no_sign() -> None:
    largest = torch.finfo(torch.float32).max
    assert estimate_quantiles(torch.full((50_000,), largest)).eq(largest).all()
    assert not estimate_quantiles(torch.full((50_000,), -0.0)).signbit().any()


def test_what_is_refused_is_named() -> None:
    for x in (torch.empty(0), torch.arange(5)):
        with pytest.raises(ValueError, match="x must be a tensor of floats with at least one element, got"):
            estimate_quantiles(x)
    for count in (0, 4097):
        with pytest.raises(ValueError, match="count must be an integer from 1 to 4096, got"):
            estimate_quantiles(torch.ones(5), count)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 4096, 4097, 1_000_003, 2112 * 4096 + 5])
def test_the_gpu_gives_the_cpus_numbers(size: int) -> None:
    x = normal(size)
    assert torch.equal(estimate_quantiles(x.cuda()).cpu(), estimate_quantiles(x))


@pytest.mark.gpu
def test_more_elements_than_fit_31_bits() -> None:
    x = torch.randn(2**31 + 12_345, device="cuda", dtype=torch.bfloat16)
    eager = _quantiles._mean_subset_quantiles(x, 256, subsets=math.ceil(x.numel() / 4096), rows=2112)
    assert torch.equal(estimate_quantiles(x), eager)
    wanted = torch.special.ndtri(torch.from_numpy(probabilities()))
    torch.testing.assert_close(estimate_quantiles(x).cpu().double(), wanted, rtol=0, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_never_waits_for_the_device() -> None:
    x = torch.randn(100_000, device="cuda")
    estimate_quantiles(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        estimate_quantiles(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
