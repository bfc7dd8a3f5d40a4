"""Float formats: what is derived must be what torch and the standards have."""

import pytest
import torch

from narrowgauge.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FloatFormat

FORMATS = [FP32, FP16, BF16, FP8_E4M3, FP8_E5M2]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_derived_facts_are_those_of_torch(fmt: FloatFormat) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.bits == info.bits
    assert fmt.max == info.max
    assert fmt.min_normal == info.smallest_normal
    assert fmt.min_subnormal == info.smallest_normal * info.eps
    assert float(fmt.ulp(torch.ones(()))) == info.eps
    assert FloatFormat.of(fmt.dtype) is fmt


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FP8_E5M2], ids=lambda fmt: fmt.name)
def test_ulp_is_the_distance_to_the_next_code_for_every_positive_code(fmt: FloatFormat) -> None:
    codes = torch.arange(2 ** (fmt.bits - 1), dtype=torch.int16 if fmt.bits == 16 else torch.uint8)
    values = codes.view(fmt.dtype).to(torch.float64)
    values = values[torch.isfinite(values)]
    assert torch.equal(fmt.ulp(values)[:-1], values.diff())
    if fmt is not BF16:  # torch's float32 holds the others' values and spacings exactly
        assert torch.equal(fmt.ulp(values.to(torch.float32)).to(torch.float64), fmt.ulp(values))
    assert torch.equal(fmt.ulp(-values), fmt.ulp(values))


def test_ulp_in_float32_reaches_below_its_normal_numbers() -> None:
    x = torch.tensor([0.0, 2.0**-140, 2.0**-126, 1.5, 200.0])
    assert BF16.ulp(x).tolist() == [2.0**-133, 2.0**-133, 2.0**-133, 2.0**-7, 1.0]
    assert torch.isnan(BF16.ulp(torch.tensor([torch.inf, torch.nan]))).all()
    wide = FloatFormat("e9m10", 9, 10)
    assert [float(wide.ulp(torch.tensor(x))) for x in (2.0**-149, 1.5)] == [2.0**-159, 2.0**-10]


def test_ulp_of_a_number_is_a_number() -> None:
    """Collage, Table 9: ulp(1)."""
    table = {FP32: 2.0**-23, FP16: 2.0**-10, BF16: 2.0**-7, FP8_E4M3: 2.0**-3, FP8_E5M2: 2.0**-2}
    assert {fmt: fmt.ulp(1.0) for fmt in FORMATS} == table
    assert BF16.ulp(200) == 1.0


def test_a_format_of_ones_own_follows_from_its_two_numbers() -> None:
    e3m4 = FloatFormat("e3m4", 3, 4)
    assert (e3m4.bias, e3m4.max, e3m4.min_normal, e3m4.min_subnormal) == (3, 15.5, 0.25, 2.0**-6)
