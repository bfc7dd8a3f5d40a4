"""Codes of float formats: decoding and encoding against torch's own bits, all of them where they are few."""

import math

import pytest
import torch

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

NARROW = [FP16, BF16, FP8_E4M3, FP8_E5M2]
OWN = [
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FloatFormat("e3m4", 3, 4),
    FloatFormat("e5m0", 5, 0, has_infinity=False, has_nan=False),
    FloatFormat("e4m11", 4, 11),
    FloatFormat("e11m4", 11, 4),
    FloatFormat("e8m7fn", 8, 7, has_infinity=False),
]


def name(fmt: FloatFormat) -> str:
    return fmt.name


def all_codes(fmt: FloatFormat) -> torch.Tensor:
    return torch.arange(1 << fmt.bits)


def as_torch(codes: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The codes as numbers of torch's dtype, bit by bit."""
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[fmt.bits]
    return codes.to(integer).view(fmt.dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, zeros by sign too, NaN where NaN."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    return torch.equal(a.nan_to_num(nan=0.125), b.nan_to_num(nan=0.125)) and torch.equal(
        torch.signbit(a) & ~torch.isnan(a), torch.signbit(b) & ~torch.isnan(b)
    )


@pytest.mark.parametrize("fmt", NARROW, ids=name)
def test_every_code_means_what_torch_reads(fmt: FloatFormat) -> None:
    codes = all_codes(fmt)
    assert same(fmt.decode(codes), as_torch(codes, fmt))
    if fmt.bits == 16:
        assert same(fmt.decode(codes.to(torch.int16)), as_torch(codes, fmt))
    codes = torch.arange(0, 1 << 32, 65_521)
    assert same(FP32.decode(codes), codes.to(torch.int32).view(torch.float32))


@pytest.mark.parametrize("fmt", [*NARROW, *OWN], ids=name)
def test_positive_codes_ascend_and_every_midpoint_goes_to_the_even_one(fmt: FloatFormat) -> None:
    codes = torch.arange(fmt.max_code + 1)
    values = fmt.decode(codes).to(torch.float64)
    assert (values.diff() > 0).all()
    assert values[-1] == fmt.max
    assert torch.equal(fmt.encode(values), codes)
    assert (fmt.encode(torch.tensor(torch.nan)) == fmt.nan_code) or not fmt.has_nan
    low, high = values[:-1], values[1:]
    middle = low / 2 + high / 2
    even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    assert torch.equal(fmt.encode(middle), even)
    assert torch.equal(fmt.encode(torch.nextafter(middle, low)), codes[:-1])
    assert torch.equal(fmt.encode(torch.nextafter(middle, high)), codes[1:])
    assert torch.equal(fmt.encode(-middle), even + (1 << fmt.bits - 1))


@pytest.mark.parametrize(
    ("fmt", "beyond"), [(FP16, math.inf), (FP8_E4M3, 448.0), (FP4_E2M1, 6.0), (FP8_E5M2, math.inf)], ids=str
)
def test_what_lies_beyond_the_largest(fmt: FloatFormat, beyond: float) -> None:
    half = float(fmt.ulp(torch.tensor(fmt.max))) / 2
    x = torch.tensor(
        [fmt.max + 0.999 * half, fmt.max + 1.001 * half, 1e300, math.inf, -math.inf], dtype=torch.float64
    )
    wanted = torch.tensor([fmt.max, beyond, beyond, beyond, -beyond], dtype=torch.float64)
    assert torch.equal(fmt.nearest(x), wanted)
    if fmt.dtype is not None:
        assert torch.equal(round_to(x, fmt).to(torch.float64), wanted)
        assert torch.equal(round_to(x.to(torch.float32), fmt).to(torch.float64), wanted)


def test_numbers_encode_and_decode_without_tensors() -> None:
    assert FP16.encode(1 / 3) == 0x3555
    assert FP16.decode(0x3555) == 0.333251953125
    assert BF16.encode(0.999) == 0x3F80
    assert FP16.encode(-0.0) == 0x8000
    assert math.copysign(1.0, FP16.decode(0x8000)) == -1.0
    assert FP8_E4M3.encode(math.nan) == 0x7F
    assert FP4_E2M1.encode(math.nan) == 0


def test_a_double_is_rounded_once() -> None:
    """Through float32 it would fall on the midpoint first, and from there to the even neighbor."""
    x = torch.tensor(1.0 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    assert BF16.decode(int(BF16.encode(x))) == 1.0 + 2.0**-7
    assert float(x.float().bfloat16()) == 1.0


def test_float8_tensors_are_rounded_too() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for fmt, other in ((FP8_E4M3, FP8_E5M2), (FP8_E5M2, FP8_E4M3)):
        x = codes.view(fmt.dtype)
        assert same(round_to(x, fmt), x)
        assert same(round_to(x, other), round_to(x.float(), other))


def test_bad_codes_and_layouts_are_named() -> None:
    with pytest.raises(ValueError, match=r"dtype must be a dtype of this layout, or None.*, got torch\.float16"):
        FloatFormat("mine", 3, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"code must be 0 to 255 for fp8_e4m3.*, got 256"):
        FP8_E4M3.decode(256)
    with pytest.raises(ValueError, match=r"code must .*got a tensor of torch\.float32"):
        FP8_E4M3.decode(torch.ones(1))
    for layout, message in (
        ((1, 2), r"exponent_bits must be 2 to 11.*, got 1"),
        ((8, 24), r"mantissa_bits must be 0 to 23.*, got 24"),
        ((5, 0), r"mantissa_bits must be at least 1.*, got 0"),
        ((11, 3, False), r"exponent_bits must be 2 to 10 without infinities.*, got 11"),
        ((5, 2, True, None, False), r"has_nan must .*got False"),
    ):
        with pytest.raises(ValueError, match=message):
            FloatFormat("mine", *layout)
