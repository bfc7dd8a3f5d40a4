"""Block-wise quantization: nearest within the block, and no block touches another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.formats import codebook
from narrowgauge.storage import quantize

SIGNED = codebook("dynamic")


@given(st.integers(0, 700), st.sampled_from([1, 7, 64, 256, None]), st.integers(0, 100))
def test_every_element_gets_the_value_nearest_to_it_at_its_blocks_scale(
    numel: int, block: int | None, seed: int
) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3
    quantized = quantize(x, SIGNED, block)
    again = quantized.dequantize()
    size = block or max(numel, 1)
    assert len(quantized.scales) == -(-numel // size)
    for number, scale in enumerate(quantized.scales.tolist()):
        part, back = x[number * size :][:size], again[number * size :][:size]
        assert scale == float(part.abs().max())
        candidates = SIGNED.double() * scale
        best = (part.double()[:, None] - candidates).abs().amin(dim=1)
        # The normalised value is rounded to float32 once; that may cost a tie a few float32 ulps.
        assert ((part.double() - back.double()).abs() <= best + 1e-6 * scale).all()


@given(st.integers(-40, 40), st.integers(0, 20))
def test_codes_do_not_change_when_everything_is_scaled_by_a_power_of_two(exponent: int, seed: int) -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(seed))
    plain, scaled = quantize(x, SIGNED), quantize(x * 2.0**exponent, SIGNED)
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scales * 2.0**exponent, scaled.scales)


def test_zeros_and_subnormal_blocks_are_zeros_and_shapes_survive() -> None:
    x = torch.zeros(3, 5, 7)
    x[0] = 2.0**-130
    quantized = quantize(x, SIGNED, 35)
    assert quantized.codes.shape == x.shape
    assert torch.equal(quantized.dequantize(), torch.zeros_like(x))
    assert torch.equal(quantize(torch.tensor(0.5), SIGNED).dequantize(), torch.tensor(0.5))
    assert quantize(torch.zeros(0), SIGNED).dequantize().shape == (0,)


def test_layout_does_not_matter() -> None:
    x = torch.randn(6, 4, 5, 5)
    wanted = quantize(x, SIGNED, 16).dequantize()
    assert torch.equal(quantize(x.to(memory_format=torch.channels_last), SIGNED, 16).dequantize(), wanted)
    assert torch.equal(quantize(x.mT.contiguous().mT, SIGNED, 16).dequantize(), wanted)


def test_one_inf_or_nan_spoils_nothing_but_itself() -> None:
    x = torch.randn(512)
    wanted = quantize(x, SIGNED).dequantize()
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoiled = x.clone()
        position = int(x[:256].abs().argmin())
        spoiled[position] = bad
        again = quantize(spoiled, SIGNED).dequantize()
        assert torch.isfinite(again).all()
        others = torch.arange(512) != position
        assert torch.equal(again[others], wanted[others])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="block_size: got 0"):
        quantize(torch.ones(3), SIGNED, 0)
    with pytest.raises(ValueError, match=r"^codebook: "):
        quantize(torch.ones(3), torch.ones(300))
