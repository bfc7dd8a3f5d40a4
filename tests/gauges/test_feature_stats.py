"""Magnitudes and what formats would lose: every 16-bit pattern against rounding itself, by hand, and added."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.formats import (
    BF16,
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FloatFormat,
    round_to,
)
from narrowgauge.gauges import TARGETS, FeatureStats, FormatLoss, Target, feature_stats
from narrowgauge.linear._quantize import quantize

ALL = list(TARGETS)
FLOATS = {"fp16": FP16, "bf16": BF16, "e4m3": FP8_E4M3, "e5m2": FP8_E5M2}


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every number that a 16-bit dtype has, the infinities and NaN among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def rounded_magnitudes(x: torch.Tensor, fmt: FloatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """|x| in the format (by `round_to`), and |x| rounded to the same spacing as if there were no largest number."""
    kept = round_to(x, fmt).to(torch.float64).abs()
    ulp = fmt.ulp(x.to(torch.float64))
    steps = x.to(torch.float64).abs() / ulp  # exact: a division by a power of two
    return kept, torch.round(steps) * ulp  # ties to even, which is the even code but for a fraction of 0 bits


def shares(x: torch.Tensor, fmt: FloatFormat) -> FormatLoss:
    """What rounding does to each element, counted."""
    finite = x[torch.isfinite(x) & (x != 0)]
    kept, free = rounded_magnitudes(finite, fmt)
    beyond = free > fmt.max
    counts = (
        (kept == 0).sum(),
        ((kept > 0) & (kept < fmt.min_normal)).sum(),
        ((kept == fmt.max) | beyond).sum(),
        beyond.sum(),
    )
    return FormatLoss(*(float(count) / len(finite) for count in counts))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_16_bits_is_lost_as_rounding_loses_it(name: str, dtype: torch.dtype) -> None:
    """All together, and each alone by its boundaries: counts of a whole could agree by chance."""
    x, fmt = patterns(dtype), FLOATS[name]
    stats = feature_stats(x, [name])
    assert stats.losses[name] == shares(x, fmt)
    assert (stats.elements, stats.nonfinite) == (2**16, int((~torch.isfinite(x)).sum()))
    x = x[torch.isfinite(x)]
    kept, free = rounded_magnitudes(x, fmt)
    reached = [x.to(torch.float32).abs() >= boundary for boundary in TARGETS[name].boundaries_in(torch.float32)]
    wanted = [kept > 0, kept >= fmt.min_normal, (kept == fmt.max) | (free > fmt.max), free > fmt.max]
    for got, expected in zip(reached, wanted, strict=True):
        assert torch.equal(got, expected)
    if fmt.has_infinity:
        assert torch.equal(reached[3], torch.isinf(kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1, FP32], ids=str)
def test_the_neighbors_of_a_boundary_lie_on_its_two_sides(fmt: FloatFormat, dtype: torch.dtype) -> None:
    below, normal, saturated, beyond = Target("it", fmt, scaled=False).boundaries_in(dtype)
    for boundary in (below, normal, saturated, beyond):
        if math.isinf(boundary):
            assert (fmt, dtype) == (FP32, torch.float32)  # nothing of a dtype overflows in itself
            continue
        at = torch.tensor(boundary, dtype=dtype)
        under = torch.nextafter(at, at.new_zeros(()))
        here, there = (round_to(value.to(torch.float64), fmt).double() for value in (at, under))
        if boundary == beyond:
            free = [float(rounded_magnitudes(value, fmt)[1]) for value in (at, under)]
            assert free[0] > fmt.max >= free[1]
        else:
            limit = {below: fmt.min_subnormal, normal: fmt.min_normal, saturated: fmt.max}[boundary]
            assert here >= limit > there


def scaled_shares(x: torch.Tensor, format: str) -> FormatLoss:
    """What our linear layers' quantizer does with one scale for the tensor."""
    codes = quantize(x[None], "tensor", format).codes[0].to(torch.float64).abs()
    finite = torch.isfinite(x)
    kept, whole = codes[finite & (x != 0)], int((finite & (x != 0)).sum())
    largest, normal = {
        "int8": (127, 1),
        "e4m3": (448, FP8_E4M3.min_normal),
        "e5m2": (57344, FP8_E5M2.min_normal),
    }[format]
    counts = (kept == 0).sum(), ((kept > 0) & (kept < normal)).sum(), (kept == largest).sum()
    return FormatLoss(*(float(count) / whole for count in counts), overflow=0.0)


@pytest.mark.parametrize("name", ["int8", "e4m3 scaled", "e5m2 scaled"])
def test_every_pattern_below_an_absmax_is_scaled_as_in_our_linear_layers(name: str) -> None:
    x = patterns(torch.bfloat16)
    x = x[x.abs() <= 3.0]
    assert feature_stats(x, [name]).losses[name] == scaled_shares(x, name.removesuffix(" scaled"))


def test_magnitudes_by_hand() -> None:
    stats = feature_stats(torch.tensor([[1.0, -3.0], [0.0, math.inf], [math.nan, -0.0]]), ["e4m3"])
    assert (stats.elements, stats.nonfinite, stats.nonzero) == (6, 2, 2)
    assert (stats.peak, stats.mean_magnitude, stats.mean) == (3.0, 1.0, -0.5)
    assert stats.losses == {"e4m3": FormatLoss(0.0, 0.0, 0.0, 0.0)}


def test_losses_by_hand() -> None:
    # e4m3: smallest 2^-9, normal from 2^-6, largest 448; 464 is halfway to 480 and goes to the even code, 448.
    x = torch.tensor([2.0**-10, 1.01 * 2**-10, 2.0**-7, 1.0, 431.0, 432.0, 464.0, 465.0])
    assert feature_stats(x, ["e4m3"]).losses["e4m3"] == FormatLoss(1 / 8, 2 / 8, 3 / 8, 1 / 8)
    # fp16 rounds 65520 to infinity; 65519 to 65504, its largest.
    x = torch.tensor([65519.0, 65520.0, 2.0**-25, 2.0**-24])
    assert feature_stats(x, ["fp16"]).losses["fp16"] == FormatLoss(1 / 4, 1 / 4, 2 / 4, 1 / 4)
    # int8: half a code is 1/254 of the absmax, and a tie goes to the even code, zero.
    x = torch.tensor([127.0, -126.6, 0.5, 0.6, 1.0])
    assert feature_stats(x, ["int8"]).losses["int8"] == FormatLoss(1 / 5, 0.0, 2 / 5, 0.0)


@given(
    values=st.lists(st.floats(-100, 100, width=32), max_size=40),
    power=st.integers(-60, 60),
    cut=st.integers(0, 40),
)
@settings(max_examples=50)
def test_parts_add_up_and_scales_scale(values: list[float], power: int, cut: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    x = x * (x.abs() > 1e-3)  # scaled by 2^-60 it stays a normal number
    plain = ["fp16", "bf16", "e4m3", "e5m2"]
    whole = feature_stats(x, plain)
    total = FeatureStats.total([feature_stats(x[:cut], plain), feature_stats(x[cut:], plain)])
    torch.testing.assert_close(total.sums, whole.sums, rtol=1e-14, atol=1e-14)
    assert total.peak == whole.peak == (float(x.abs().max()) if len(x) else 0.0)
    there = feature_stats(x * 2.0**power, ["int8", "e5m2 scaled"])
    here = feature_stats(x, ["int8", "e5m2 scaled"])
    assert there.peak == here.peak * 2.0**power
    torch.testing.assert_close(there.sums[5:], here.sums[5:])


def test_sums_agree_with_float64() -> None:
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 1e-4
    stats = feature_stats(x)
    assert stats.mean_magnitude == pytest.approx(float(x.double().abs().mean()), rel=1e-12)
    assert stats.mean == pytest.approx(float(x.double().mean()), rel=1e-9)
    torch.testing.assert_close(feature_stats(x.t()).sums, stats.sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(feature_stats(x.double()).sums, stats.sums, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
def test_narrow_tensors_are_measured_too(dtype: torch.dtype) -> None:
    stats = feature_stats(torch.tensor([0.5, -2.0, 0.0]).to(dtype), ALL)
    assert (stats.peak, stats.nonzero, stats.mean_magnitude) == (2.0, 2, pytest.approx(2.5 / 3))


@pytest.mark.parametrize("x", [torch.zeros(0), torch.zeros(5), torch.full((3,), math.nan)], ids=str)
def test_a_tensor_with_nothing_to_lose(x: torch.Tensor) -> None:
    stats = feature_stats(x, ALL)
    assert (stats.peak, stats.nonzero, stats.elements) == (0.0, 0, x.numel())
    assert all(math.isnan(loss.underflow) for loss in stats.losses.values())
    finite = x.numel() - stats.nonfinite
    assert math.isnan(stats.mean_magnitude) == (finite == 0)


def test_below_the_smallest_absmax_a_scaled_tensor_is_zeros() -> None:
    x = torch.tensor([2.0**-111, 2.0**-115])
    assert feature_stats(x, ["int8"]).losses["int8"] == FormatLoss(1.0, 0.0, 0.0, 0.0) == scaled_shares(x, "int8")


def test_what_is_refused() -> None:
    for options, message in (
        (["fp7"], r"formats must be Targets or of 'fp16', 'bf16', .*, got 'fp7'"),
        ("e4m3", r"formats must be a list such as .*, got 'e4m3'"),
        (["e4m3", "e4m3"], "formats must have different names, got 'e4m3' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            feature_stats(torch.ones(2), options)
    with pytest.raises(ValueError, match=r"x must be a float tensor, got torch\.int64"):
        feature_stats(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="stats must have the same formats"):
        FeatureStats.total([feature_stats(torch.ones(2), [name]) for name in ("e4m3", "e5m2")])
