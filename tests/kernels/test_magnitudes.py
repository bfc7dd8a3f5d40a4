"""The kernel's counts are the specification's, and its sums within the order of adding in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from narrowgauge.gauges import TARGETS, feature_stats
from narrowgauge.gauges import _magnitudes as specification
from narrowgauge.gauges._formats import targets
from narrowgauge.gauges._watch._batched_magnitudes import _by_kernels, in_torch
from narrowgauge.gauges._watch._batched_rows import LONG, Sample
from narrowgauge.kernels import _magnitudes as kernel

ALL = list(TARGETS)


def agree(x: Tensor, device: str, formats: list[str] = ALL) -> None:
    asked = targets(formats)
    sums, absmax = specification._by_kernels(x.to(device), asked)
    wanted, largest = specification._in_torch(x, asked)
    assert sums.dtype == torch.float64
    assert float(absmax) == float(largest)
    counted = [place for place in range(len(wanted)) if place not in (3, 4)]
    assert sums.cpu()[counted].tolist() == wanted[counted].tolist()
    magnitude = float(wanted[3])
    torch.testing.assert_close(sums.cpu()[3:5], wanted[3:5], rtol=0, atol=1e-13 * magnitude)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_16_bits(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    agree(x, device)
    agree(x[x.abs() <= 3.0], device)  # scaled by 3 instead of by the dtype's largest


SIZES = [1, kernel._TILE - 1, kernel._TILE, kernel._TILE + 1, 3 * kernel._TILE + 77]


@pytest.mark.parametrize(("size", "dtype"), [*zip(SIZES, 2 * kernel.DTYPES, strict=False)])
def test_sizes(size: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(size)
    spread = 10 ** (12 * torch.rand(size, generator=generator) - 9)
    agree((torch.randn(size, generator=generator) * spread).to(dtype), device)


def test_at_the_boundaries_of_float32(device: str) -> None:
    bounds = torch.tensor([b for target in TARGETS.values() for b in target.boundaries_in(torch.float32)])
    around = [torch.nextafter(bounds, bounds.new_tensor(end)) for end in (0.0, math.inf)]
    x = torch.cat([bounds, *around])
    agree(torch.cat([x, -x, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45])]), device)


@pytest.mark.parametrize("formats", [[], ["int8"], ["e5m2", "e4m3 scaled", "bf16"]])
def test_formats_keep_their_columns(formats: list[str], device: str) -> None:
    agree(torch.randn(1000, generator=torch.Generator().manual_seed(0)), device, formats)
    for nothing in (torch.zeros(9), torch.full((9,), math.nan), torch.full((9,), 2.0**-111)):
        agree(nothing, device, formats)  # nothing to scale by


@pytest.mark.parametrize(
    ("turn", "formats"), [(0, []), (3, ["int8"]), (15, ["e4m3", "int8", "e5m2 scaled", "fp16"]), (16, ["fp16"])]
)
def test_many_vectors_at_once(turn: int, formats: list[str], device: str) -> None:
    """Of all dtypes and lengths: short, just long enough for a sample, long with rows that are not whole, none."""
    generator = torch.Generator().manual_seed(turn)
    lengths = (1, 1000, 0, LONG - 1, LONG, LONG + 5, 3 * LONG + 1023, 4096)
    vectors = [
        (torch.randn(length, generator=generator) * 10.0 ** (number % 5 - 3)).to(kernel.DTYPES[number % 3])
        for number, length in enumerate(lengths)
    ]
    vectors[3][7], vectors[5][-1], vectors[6][100] = math.nan, math.inf, -math.inf
    asked = targets(formats)
    got = _by_kernels([vector.to(device) for vector in vectors], asked, Sample(turn)).cpu()
    wanted = in_torch(vectors, asked, Sample(turn))
    exact = [column for column in range(wanted.shape[1]) if column not in (4, 5)]
    assert torch.equal(got[:, exact], wanted[:, exact])
    assert bool(((got[:, 4:6] - wanted[:, 4:6]).abs() <= 1e-13 * wanted[:, 4:5]).all())


@pytest.mark.parametrize(("size", "dtype"), [*zip([0, 4095, 9000], kernel.DTYPES, strict=True)])
def test_one_vector_alone_has_the_sums_that_it_has_among_many(size: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    rows = kernel.tile_sums(x)
    assert len(rows) == -(-size // 4096)
    wanted = kernel.measure([torch.ones(5, device=device), x])[1:]
    assert torch.equal(kernel.add_rows(rows, [len(rows)], largest=True), wanted)


def test_a_vector_of_more_rows_than_are_added_at_once(device: str) -> None:
    rows = torch.rand(200, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = [0, 130, 1, 0, 69]
    for largest in (True, False):
        got = kernel.add_rows(rows.to(device), counts, largest).cpu()
        for part, one in zip(rows.split(counts), got, strict=True):
            wanted = part.sum(0)
            if largest and len(part):
                wanted[0] = part[:, 0].max()
            torch.testing.assert_close(one, wanted, rtol=1e-14, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_the_kernel_is_taken_and_nothing_is_waited_for() -> None:
    x = torch.randn(300, 400, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    feature_stats(x, ALL)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = feature_stats(x.t(), ALL)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.sums.is_cuda
    wanted = feature_stats(x.cpu(), ALL)
    assert stats.losses == wanted.losses
    assert stats.mean_magnitude == pytest.approx(wanted.mean_magnitude, rel=1e-12)
