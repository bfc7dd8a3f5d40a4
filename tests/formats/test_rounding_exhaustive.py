"""Rounding to nearest against torch's cast: every float32 pattern as input, in strides by default, all if slow."""

from collections.abc import Iterator

import pytest
import torch

from narrowgauge.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FloatFormat, round_to

FORMATS = [FP16, BF16, FP8_E4M3, FP8_E5M2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 1 << 24
# torch before 2.12 casts what lies beyond float8_e4m3fn's largest number to NaN, not to that number.
NAN_BEYOND = bool(torch.isnan(torch.tensor(1e3, device=DEVICE).to(torch.float8_e4m3fn).float()))


def patterns(stride: int) -> Iterator[torch.Tensor]:
    """Float32 numbers by their bits, from all 2^32, in chunks."""
    for start in range(-(2**31), 2**31, CHUNK * stride):
        stop = min(start + CHUNK * stride, 2**31)
        codes = torch.arange(start, stop, stride, dtype=torch.int64, device=DEVICE)
        yield codes.to(torch.int32).view(torch.float32)


def check(x: torch.Tensor, fmt: FloatFormat) -> None:
    """Our rounding of the double equals torch's cast of the float, code by code; round_to is that cast."""
    if not fmt.has_infinity and NAN_BEYOND:
        x = x.clamp(-fmt.max, fmt.max)
    cast = x.to(fmt.dtype)
    integer = torch.int16 if fmt.bits == 16 else torch.uint8
    nan = torch.isnan(cast.to(torch.float32))
    codes = torch.where(nan, fmt.nan_code, cast.view(integer).to(torch.int64) & (1 << fmt.bits) - 1)
    assert torch.equal(fmt.encode(x), codes)
    assert torch.equal(round_to(x, fmt).view(integer), cast.view(integer))
    ours = round_to(x.to(torch.float64), fmt)
    assert torch.equal(ours.view(integer)[~nan], cast.view(integer)[~nan])
    assert torch.isnan(ours.to(torch.float32)[nan]).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_nearest_is_torchs_cast_over_float32_patterns_in_strides(fmt: FloatFormat) -> None:
    # A prime stride walks through all low bits; a power of two, through all exponents' ends.
    for stride in (8191, 1 << 14):
        for x in patterns(stride):
            check(x, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_nearest_is_torchs_cast_around_every_code_and_midpoint(fmt: FloatFormat) -> None:
    values = fmt.decode(torch.arange(fmt.max_code + 1)).to(torch.float64)
    middles = ((values[:-1] + values[1:]) / 2).to(torch.float32)
    edges = torch.cat(
        [values.to(torch.float32), middles, torch.tensor([fmt.max * (1 + 2.0 ** -(fmt.mantissa_bits + 2))])]
    )
    around = [torch.nextafter(edges, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    x = torch.cat([edges, *around])
    check(torch.cat([x, -x]).to(DEVICE), fmt)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_nearest_is_torchs_cast_for_every_float32(fmt: FloatFormat) -> None:
    for x in patterns(1):
        check(x, fmt)


def test_fp32_is_float32() -> None:
    x = torch.arange(-(2**31), 2**31, 65_521).to(torch.int32).view(torch.float32)
    x = x[~torch.isnan(x)]
    assert torch.equal(round_to(x, FP32).view(torch.int32), x.view(torch.int32))
    assert torch.equal(FP32.encode(x), x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF)
    wide = torch.randn(100_000, dtype=torch.float64) * 10.0 ** torch.empty(100_000).uniform_(-44, 38)
    assert torch.equal(round_to(wide, FP32), wide.to(torch.float32))
