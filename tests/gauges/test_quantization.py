"""Quantization errors and the map of Adam's errors: by hand, against a loop, and their algebra."""

import math

import pytest
import torch

from narrowgauge.formats import codebook
from narrowgauge.gauges import AdamErrorMap, QuantizationError, adam_error_map, quantization_error
from narrowgauge.storage import Quantized, quantize

EPS = 1e-8


def moments(count: int = 3000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second moments that span several decades, a zero update among them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (4 * torch.rand(count, generator=generator) - 6)
    m = torch.randn(count, generator=generator) * scale
    m[7] = 0.0
    return m, (torch.randn(count, generator=generator) * scale) ** 2


def both(name: str, block: int | None = 256) -> tuple[torch.Tensor, torch.Tensor, Quantized, Quantized]:
    m, v = moments()
    return m, v, quantize(m, codebook(name), block), quantize(v, codebook(name, signed=False), block)


def test_the_error_of_a_tensor_by_hand() -> None:
    x = torch.tensor([1.0, -0.5, 0.2, 0.0])
    error = quantization_error(x, quantize(x, torch.tensor([-1.0, 0.0, 1.0]), None))
    assert error.mean_absolute == pytest.approx((0.5 + 0.2) / 4)  # a half is rounded towards zero
    assert error.relative_norm == pytest.approx(math.sqrt((0.25 + 0.04) / 1.29))
    assert error.flushed == pytest.approx(2 / 3)
    assert error.usage[:3].tolist() == [0.0, 3.0, 1.0]
    assert error.entropy == pytest.approx(-(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)))


def test_codes_used_evenly_hold_eight_bits() -> None:
    values = codebook("dynamic")
    error = quantization_error(values, quantize(values, values, None))
    assert error.entropy == pytest.approx(8.0)
    assert error.mean_absolute == 0.0


def test_the_map_is_what_a_loop_over_updates_finds() -> None:
    m, v, m8, v8 = both("dynamic")
    found = adam_error_map(m, v, m8, v8, EPS)
    cells: dict[tuple[int, int], list[tuple[float, float | None]]] = {}
    kept = zip(m8.dequantize().tolist(), v8.dequantize().tolist(), strict=True)
    exact = zip(m.tolist(), v.tolist(), strict=True)
    for a, b, (x, y), (x8, y8) in zip(m8.codes.tolist(), v8.codes.tolist(), exact, kept, strict=True):
        u, u8 = x / (math.sqrt(y) + EPS), x8 / (math.sqrt(y8) + EPS)
        cells.setdefault((a, b), []).append((abs(u - u8), abs(u - u8) / abs(u) if u else None))
    absolute, relatives = found.absolute, found.relative
    assert int((found.usage > 0).sum()) == len(cells)
    for (a, b), errors in cells.items():
        relative = [error for _, error in errors if error is not None]
        assert found.usage[a, b] == len(errors)
        assert float(absolute[a, b]) == pytest.approx(sum(e for e, _ in errors) / len(errors), rel=1e-9)
        if relative:
            assert float(relatives[a, b]) == pytest.approx(sum(relative) / len(relative), rel=1e-9)
    everything = [error for errors in cells.values() for error in errors]
    assert found.mean_absolute == pytest.approx(sum(e for e, _ in everything) / len(everything), rel=1e-9)
    relative = [error for _, error in everything if error is not None]
    assert len(relative) == len(everything) - 1
    assert found.mean_relative == pytest.approx(sum(relative) / len(relative), rel=1e-9)


def test_with_an_exact_second_moment_the_error_is_that_of_the_first() -> None:
    m, v, m8, _ = both("dynamic")
    found = adam_error_map(m, v, m8, None, EPS)
    assert found.cells.shape == (4, 256, 1)
    relative = (m.double() - m8.dequantize().double()).abs()[m != 0] / m.double().abs()[m != 0]
    assert found.mean_relative == pytest.approx(float(relative.mean()), rel=1e-9)
    assert relative.max() <= 1.0  # zero is a code, and the nearest is taken


def test_sums_over_parts_are_those_of_the_whole() -> None:
    m, v, m8, v8 = both("dynamic", None)
    whole = adam_error_map(m, v, m8, v8, EPS)

    def part(q: Quantized, where: slice) -> Quantized:
        return Quantized(q.codes[where], q.scales, q.codebook, None)

    halves = slice(0, 1000), slice(1000, None)
    maps = [adam_error_map(m[at], v[at], part(m8, at), part(v8, at), EPS) for at in halves]
    total = AdamErrorMap.total(maps)
    torch.testing.assert_close(total.cells, whole.cells)
    assert total.relative_norm == pytest.approx(whole.relative_norm)
    errors = [quantization_error(m[at], part(m8, at)) for at in halves]
    assert QuantizationError.total(errors).mean_absolute == pytest.approx(quantization_error(m, m8).mean_absolute)
    by_code = whole.by_first_code
    assert by_code.mean_absolute == pytest.approx(whole.mean_absolute)
    assert by_code.usage[:, 0].tolist() == quantization_error(m, m8).usage.tolist()


def test_scaling_gradients_is_scaling_epsilon() -> None:
    m, v, m8, v8 = both("dynamic")
    scaled = [q * factor for q, factor in ((m, 2.0**-20), (v, 2.0**-40))]
    small = [
        quantize(scaled[0], m8.codebook, m8.block_size),
        quantize(scaled[1], v8.codebook, v8.block_size),
    ]
    there = adam_error_map(*scaled, *small, EPS)
    here = adam_error_map(m, v, m8, v8, EPS * 2.0**20)
    torch.testing.assert_close(there.cells, here.cells)


def test_overlap_is_the_share_of_updates_in_the_worst_cells() -> None:
    cells = torch.zeros(4, 256, 256, dtype=torch.float64)
    for place, (count, error) in enumerate([(70, 0.1), (20, 0.2), (9, 0.3), (1, 0.4)]):
        cells[:, place, 0] = torch.tensor([count, count * error, count * error, count], dtype=torch.float64)
    found = AdamErrorMap(cells, torch.zeros(2))
    assert found.overlap(0.25) == pytest.approx(0.01)
    assert found.overlap(0.5) == pytest.approx(0.10)
    assert found.overlap(1.0) == 1.0
    assert found.overlap(1e-9) == pytest.approx(0.01)  # one cell at least


def test_what_is_refused() -> None:
    m, v, m8, v8 = both("dynamic")
    with pytest.raises(ValueError, match=r"v must have shape \(3000,\), got \(1,\)"):
        adam_error_map(m, v[:1], m8, v8)
    with pytest.raises(ValueError, match=r"eps must be a finite number above 0, got 0\.0"):
        adam_error_map(m, v, m8, v8, eps=0.0)
    with pytest.raises(ValueError, match=r"worst must be above 0 and at most 1, got 0"):
        adam_error_map(m, v, m8, v8).overlap(0)
    with pytest.raises(ValueError, match="at least one update"):
        AdamErrorMap(torch.zeros(4, 256, 256, dtype=torch.float64), torch.zeros(2)).overlap()
