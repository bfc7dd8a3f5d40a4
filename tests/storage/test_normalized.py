"""Codes in units of a second moment's root, against their definition element by element, and what they promise."""

import math

import numpy as np
import pytest
import torch
from coded_states import Coded

from narrowgauge.storage._log_states import unit_of

F = np.float32
BITS = pytest.mark.parametrize("bits", [8, 4])
MAGNITUDES = {8: [float(k) for k in range(128)], 4: [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]}


def data(decades: float, shape=(32, 256), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second moments of some steps, each element with a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (decades * (torch.rand(shape, generator=generator) - 0.5))
    m, v = torch.zeros(shape), torch.zeros(shape)
    for _ in range(30):
        g = scale * torch.randn(shape, generator=generator)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return m, v


def test_the_unit_is_the_largest_power_of_two_not_above_the_root() -> None:
    v = torch.cat([2.0 ** torch.arange(-126.0, 128.0), torch.rand(1000) * 10 ** (60 * torch.rand(1000) - 30)])
    for x, unit in zip(v.tolist(), unit_of(v).tolist(), strict=True):
        assert math.log2(unit) == math.floor(math.log2(math.sqrt(x)) + 1e-12)
        assert unit * unit <= x < 4 * unit * unit
    assert unit_of(torch.zeros(1)).item() == 2.0**-64
    # A NaN has the largest, whatever its sign and its other bits: what is beside it in a block keeps its scale.
    nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x400000, -0x7FFFFF], dtype=torch.int32)
    assert nans.view(torch.float32).isnan().all()
    assert set(unit_of(nans.view(torch.float32)).tolist()) == {2.0**64}


@BITS
@pytest.mark.parametrize("decades", [0, 6, 12])
def test_codes_and_values_are_those_of_the_definition(bits: int, decades: float) -> None:
    m, v = data(decades, (4, 60))
    m[0, 3] = 0.0
    m[1] = 0.0
    codes = Coded.of(bits, signed=True, has_normalizer=True)
    found, scales = codes.encode(m, 60, v=v)
    values = codes.decode(found, scales, 60, v)
    numbers = np.array(MAGNITUDES[bits], F)
    for row in range(4):
        exponent = [math.floor((math.frexp(x)[1] - 1) / 2) for x in v[row].tolist()]
        q = np.array([F(x) * F(2.0**-e) for x, e in zip(m[row].tolist(), exponent, strict=True)], F)
        top = np.abs(q).max()
        scale = top / numbers[-1]
        assert scales[row].item() == scale
        for i in range(60):
            scaled = q[i] * (F(1) / scale) if top else F(0)
            # The nearest, ties to even and to the smaller; numpy's argmin takes the first of equals.
            k = int(np.rint(abs(scaled))) if bits == 8 else int(np.abs(numbers - abs(scaled)).argmin())
            wanted = math.copysign(numbers[k] * scale, q[i]) if k else 0.0
            assert found[row, i].item() == ((k if q[i] > 0 else -k) % 256 if bits == 8 else k + 8 * (q[i] < 0 < k))
            assert values[row, i].item() == F(wanted * F(2.0 ** exponent[i]))


@BITS
@pytest.mark.parametrize("decades", [0, 6, 12])
def test_an_error_is_a_share_of_the_unit_and_never_more_than_the_element(bits: int, decades: float) -> None:
    m, v = data(decades)
    codes = Coded.of(bits, signed=True, has_normalizer=True)
    found, scales = codes.encode(m, 256, v=v)
    again = codes.decode(found, scales, 256, v)
    error = (again.double() - m.double()).abs()
    widest = 1 / 2 if bits == 8 else 1
    assert (error <= unit_of(v).double() * scales[:, None].double() * widest * 1.00001).all()
    assert (error <= m.abs()).all()
    assert (torch.sign(again) == torch.sign(m))[again != 0].all()
    quotient = (m / unit_of(v)).abs()
    outermost = quotient == quotient.amax(dim=1, keepdim=True)
    assert torch.allclose(again[outermost], m[outermost], rtol=2.0**-23, atol=0)  # two roundings
    twice = codes.decode(*codes.encode(again, 256, v=v), 256, v)
    assert torch.allclose(twice, again, rtol=3e-7, atol=0)


@BITS
def test_what_is_no_number_stays_in_its_place(bits: int) -> None:
    m, v = data(1, (3, 32))
    m[0, 3], m[1, 4] = float("nan"), float("inf")
    m[2], v[2] = 0.0, 0.0
    m[2, 5] = 1e-20  # a gradient whose square is zero in float32
    codes = Coded.of(bits, signed=True, has_normalizer=True)
    again = codes.decode(*codes.encode(m, 32, v=v), 32, v)
    assert again[0, 3] == 0
    assert torch.isfinite(again[0]).all()
    assert again[1, 4] == 0
    others = torch.arange(32) != 4
    alone = codes.decode(*codes.encode(m[1:2, others], 31, v=v[1:2, others]), 31, v[1:2, others])
    assert torch.equal(again[1, others], alone[0])
    assert again[2, 5].item() == pytest.approx(m[2, 5].item(), rel=2.0**-23)
    assert not again[2, :5].any()


@BITS
def test_a_second_moment_that_was_kept_as_zero_leaves_the_others_of_its_block_alone(bits: int) -> None:
    m, v = data(1, (4, 64))
    m[0, 5], v[0, 5] = 0.01, 0.0
    m[1, 6], v[1, 6] = 2.0**100, 0.0  # its quotient is infinite
    m[2, 7], v[2, 7] = 2.0**-58, 1e-40  # below float32's normal numbers
    m[3, 8], v[3, 8] = 63 * 2.0**-64, 0.0  # an average whose square is too small for float32
    codes = Coded.of(bits, signed=True, has_normalizer=True)

    def stored(x: torch.Tensor) -> torch.Tensor:
        found, scales = codes.encode(x, 64, v=v)
        return codes.decode(found, scales, 64, v)

    again = stored(m)
    without = m.clone()
    without[0, 5] = without[1, 6] = without[2, 7] = 0.0
    assert torch.equal(again, stored(without))
    assert again[3, 8].item() == pytest.approx(m[3, 8].item(), rel=2.0**-22)
    assert float((again - without)[:3].norm() / without[:3].norm()) < {8: 0.02, 4: 0.2}[bits]
