"""The quantizers: codes and scales bit for bit, zeros, small and huge scales, what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import linear_oracle as oracle
from narrowgauge.linear import quantize
from pairwise import by_pairs

FORMS = ("int8", "e4m3", "e5m2")
SCALINGS = ("row", "column", "tensor", "row128", "column128", "tile128")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_codes_and_scales_are_the_oracles(scaling: str, form: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 90) * torch.exp(3 * torch.randn(60, 90))
    x[7] = 0
    x[:, 11] = 0
    got, wanted = quantize(x, scaling, form), oracle.code(x.numpy(), scaling, form)
    assert np.array_equal(got.codes.double().numpy(), wanted.codes)
    assert np.array_equal(got.scale.numpy(), wanted.scale)
    assert got.dequantize(torch.bfloat16).dtype == torch.bfloat16


@by_pairs(scaling=oracle.BLOCKS.keys(), form=FORMS, shape=[(128, 256), (129, 127), (1, 300), (300, 1), (257, 130)])
def test_blocks_are_the_oracles_where_the_last_is_shorter(scaling: str, form: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    x[:128, :128] = 0
    for matrix in (x, x.t().contiguous().t()):
        got, wanted = quantize(matrix, scaling, form), oracle.code(x.numpy(), scaling, form)
        assert np.array_equal(got.codes.double().numpy(), wanted.codes)
        assert np.array_equal(got.scale.numpy(), wanted.scale)
    # Each block by itself, as a tensor; and its numbers.
    high, wide = oracle.BLOCKS[scaling]
    for i, rows in enumerate(x.split(high)):
        for j, block in enumerate(rows.split(wide, 1)):
            alone = quantize(block, "tensor", form)
            assert torch.equal(got.scale[i, j].reshape(1, 1), alone.scale)
            part = got.dequantize()[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            assert torch.equal(part, alone.dequantize())
    assert torch.equal(got.t().dequantize(), got.dequantize().t())


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_every_float8_value_and_every_tie_is_rounded_right(form: str) -> None:
    """All values, the midpoints between them and their float32 neighbors, at a scale of 1."""
    largest = oracle.LARGEST[form]
    values = np.array([oracle.FLOATS[form].decode(c) for c in range(128)])
    values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e30))])
    points = points[points <= largest]
    x = torch.from_numpy(np.concatenate([points, -points, [largest]]).astype(np.float32))[None]
    codes, scale = quantize(x, "tensor", form)
    assert scale.item() == 1
    assert np.array_equal(codes.double().numpy(), oracle.nearest(x.numpy(), form))


def test_int8_rounds_ties_to_even_and_never_reaches_minus_128() -> None:
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]])
    assert quantize(x, "row").codes.tolist() == [[127, -127, 0, 2, 2, 0, -2, 126, -126]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_and_nothing(scaling: str, form: str) -> None:
    for shape in ((3, 4), (0, 4), (3, 0), (0, 0)):
        codes, scale = quantize(torch.zeros(shape), scaling, form)
        assert codes.shape == shape
        assert not codes.float().any()
        rows, columns = shape
        some = int(rows > 0), int(columns > 0)
        assert scale.shape == {
            "row": (rows, 1), "column": (1, columns), "tensor": (1, 1),
            "row128": (rows, some[1]), "column128": (some[0], columns), "tile128": some,
        }[scaling]  # fmt: skip
        assert not scale.any()


@pytest.mark.parametrize("form", FORMS)
def test_scales_stay_normal_and_what_is_smaller_is_zero(form: str) -> None:
    smallest = 2.0**-110
    x = torch.tensor([[smallest, -smallest / 2], [smallest * 0.99, 0.0], [1e-45, 0.0], [3e38, -1e38]])
    codes, scale = quantize(x, "row", form)
    assert codes.float().bool().tolist() == [[True, True], [False, False], [False, False], [True, True]]
    assert scale[0].item() >= torch.finfo(torch.float32).tiny
    assert scale[1:3].tolist() == [[0], [0]]
    # Only what an element loses to its format may be missing.
    assert torch.allclose(quantize(x, "row", form).dequantize()[3], x[3], rtol=2.0**-3)


@given(st.integers(-80, 80), st.sampled_from(FORMS), st.sampled_from(SCALINGS), st.integers(0, 99))
def test_a_power_of_two_moves_the_scale_and_no_code(power: int, form: str, scaling: str, seed: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    one, other = quantize(x, scaling, form), quantize(x * 2.0**power, scaling, form)
    assert torch.equal(one.codes.float(), other.codes.float())
    assert torch.equal(one.scale * 2.0**power, other.scale)


@given(st.sampled_from(FORMS), st.sampled_from(SCALINGS), st.integers(0, 99))
def test_the_error_is_at_most_half_a_step_and_the_largest_is_kept(form: str, scaling: str, seed: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).double()
    codes, scale = quantize(x, scaling, form)
    values, wide = codes.double() * scale.double(), x.float().double() / scale.double()
    step = torch.ones_like(wide) if form == "int8" else oracle.FLOATS[form].ulp(wide)
    assert bool(((values - x).abs() <= (0.5 + 1e-4) * step * scale.double()).all())
    assert codes.float().abs().max() == oracle.LARGEST[form]
    # Monotone where a scale is shared.
    order = x.flatten().argsort() if scaling == "tensor" else None
    assert order is None or bool((codes.float().flatten()[order].diff() >= 0).all())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_comes_back_as_nan(scaling: str, bad: float) -> None:
    x = torch.randn(4, 5)
    clean = {form: quantize(x, scaling, form).dequantize() for form in FORMS}
    bad_x = x.clone()
    bad_x[1, 2] = bad
    lost = {"row": (slice(1, 2), slice(None)), "column": (slice(None), slice(2, 3)), "tensor": (slice(None),) * 2}
    lost |= {"row128": lost["row"], "column128": lost["column"], "tile128": lost["tensor"]}
    for form in FORMS:
        got = quantize(bad_x, scaling, form)
        nan = torch.zeros(4, 5, dtype=torch.bool)
        nan[lost[scaling] if form == "int8" else (1, 2)] = True
        values = got.dequantize()
        assert torch.equal(values.isnan(), nan)
        if form == "int8":
            assert not got.codes[nan].any() or scaling == "int8"
            assert torch.equal(values[~nan], clean[form][~nan])


@pytest.mark.parametrize("form", FORMS)
def test_a_given_absmax_is_the_scale_and_saturates(form: str) -> None:
    x = torch.tensor([[1.0, -2.0, 100.0, -1e30]])
    codes, scale = quantize(x, "tensor", form, torch.tensor([[2.0]]))
    largest = oracle.LARGEST[form]
    assert scale.item() == np.float32(2 / largest)
    assert codes.float().tolist()[0][1:] == [-largest, largest, -largest]
    x[0, 0] = torch.nan
    assert quantize(x, "tensor", form, torch.tensor([[2.0]])).dequantize()[0, 0].isnan()


def test_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"x must .*a matrix of floats.*got torch.float32 of shape \(3,\)"):
        quantize(torch.ones(3), "row")
    with pytest.raises(ValueError, match=r"scaling must be 'row', .* or 'tile128', got 'block'"):
        quantize(torch.ones(3, 3), "block")
    with pytest.raises(ValueError, match=r"format must be 'int8', 'e4m3' or 'e5m2', got 'int4'"):
        quantize(torch.ones(3, 3), "row", "int4")
