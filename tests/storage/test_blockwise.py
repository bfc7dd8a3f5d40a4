"""Block-wise quantization: nearest within the block, the extremum exact, and no block touches another."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.formats import FP4_E2M1, Coder, codebook, codebook_map, codebook_names
from narrowgauge.storage import quantize
from narrowgauge.storage._blockwise import Block

SIGNED = codebook("dynamic")
UNSIGNED = codebook("dynamic", signed=False)
EIGHT_BITS = [
    (name, signed)
    for name in codebook_names()
    for signed in (True, False)
    if 8 in (codebook_map(name).signed_bits if signed else codebook_map(name).unsigned_bits)
]
LARGEST = torch.finfo(torch.float32).max


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(x: torch.Tensor, block: Block) -> list[torch.Tensor]:
    """The elements of each block, the slow way."""
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    if block == "row":
        return list(matrix)
    if block == "column":
        return list(matrix.T)
    return list(x.reshape(-1).split(block or max(1, x.numel())))


layouts = st.one_of(st.sampled_from(["row", "column", None]), st.integers(1, 300))


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 30), layouts, st.booleans(), st.integers(0, 100))
def test_every_block_is_encoded_by_itself_to_nearest(n: int, m: int, block: Block, signed: bool, seed: int) -> None:
    """Against the definition, block by block: times the reciprocal of its extremum, to the nearest value."""
    x = normal(n, m, seed=seed) * 1e-3
    values = SIGNED if signed else UNSIGNED
    quantized = quantize(x, values, block)
    parts, codes, again = (blocks_of(t, block) for t in (x, quantized.codes, quantized.dequantize()))
    assert len(quantized.scales) == len(parts)
    for part, code, back, scale in zip(parts, codes, again, quantized.scales, strict=True):
        candidates = part if signed else part.clamp_min(0)
        assert scale == candidates[candidates.abs().argmax()]
        if scale == 0:
            assert not back.any()
            continue
        normalised = (part * (1 / scale)).double()
        distance = (normalised[:, None] - values.double()).abs()
        assert torch.equal(distance.gather(1, code.long()[:, None])[:, 0], distance.amin(dim=1))
        assert torch.equal(back, values[code.long()] * scale)


@pytest.mark.parametrize(("name", "signed"), EIGHT_BITS)
def test_a_codebook_is_quantized_to_its_codes(name: str, signed: bool) -> None:
    values = codebook(name, signed)
    codes = torch.arange(len(values), dtype=torch.uint8)
    for rounding in ("nearest", "stochastic"):
        quantized = quantize(values, values, None, rounding)
        assert torch.equal(quantized.codes, codes)
        assert torch.equal(quantized.dequantize(), values)
        assert torch.equal(quantize(values * 2.0**-40, values, None, rounding).codes, codes)


def test_a_codebook_may_be_named() -> None:
    x = normal(3, 300)
    assert torch.equal(quantize(x, "dynamic").dequantize(), quantize(x, SIGNED).dequantize())
    with pytest.raises(ValueError, match=r"must be one of .*'dynamic'.*, got 'dynamite'"):
        quantize(x, "dynamite")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@settings(max_examples=60)
@given(st.sampled_from(EIGHT_BITS), layouts, st.integers(-124, 126), st.integers(0, 1000))
def test_the_first_element_of_largest_magnitude_comes_back_exactly(
    rounding: str, case: tuple[str, bool], block: Block, exponent: int, seed: int
) -> None:
    """For both signs, at any magnitude, also where the other sign ties with it: coarse numbers make many ties."""
    name, signed = case
    x = (normal(9, 40, seed=seed) * 3).round() / 3 * 2.0**exponent
    x = x.clamp(-LARGEST, LARGEST) if signed else x.abs().clamp_max(LARGEST)
    again = quantize(x, codebook(name, signed), block, rounding).dequantize()
    for part, back in zip(blocks_of(x, block), blocks_of(again, block), strict=True):
        first = int(part.abs().argmax())
        assert back[first] == part[first]


@pytest.mark.parametrize("power", [16, 18])
def test_on_normal_numbers_quantile_codes_have_half_the_error_of_dynamic_ones(power: int) -> None:
    """The paper's Appendix F, in one block: where nothing stands out, fine codes near zero are wasted."""
    x = torch.randn(2**power, generator=torch.Generator().manual_seed(power))

    def error(name: str) -> float:
        return float((quantize(x, codebook(name), None).dequantize() - x).abs().mean())

    assert error("quantile") / error("dynamic") == pytest.approx(0.47, abs=0.03)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@settings(max_examples=50)
@given(st.sampled_from(EIGHT_BITS), st.integers(-119, 125), st.integers(0, 100))
def test_codes_do_not_change_when_everything_is_scaled_by_a_power_of_two(
    rounding: str, case: tuple[str, bool], exponent: int, seed: int
) -> None:
    name, signed = case
    # Magnitudes up to 4, and down to 2^-6: neither overflow nor scales below the normal range.
    x = normal(512, seed=seed).clamp(-3.9, 3.9) if signed else normal(512, seed=seed).square().clamp_max(3.9)
    values = codebook(name, signed)
    plain = quantize(x, values, 128, rounding, torch.Generator().manual_seed(0))
    scaled = quantize(x * 2.0**exponent, values, 128, rounding, torch.Generator().manual_seed(0))
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scales * 2.0**exponent, scaled.scales)


def test_rows_columns_and_tensors_are_what_they_say() -> None:
    x = normal(6, 5, 8)
    assert torch.equal(quantize(x, SIGNED, "row").codes, quantize(x, SIGNED, 8).codes)
    assert quantize(x, SIGNED, "row").scales.shape == (30,)
    by_column = quantize(x, SIGNED, "column")
    transposed = quantize(x.reshape(30, 8).T, SIGNED, "row")
    assert torch.equal(by_column.codes, transposed.codes.T.reshape(x.shape))
    assert torch.equal(by_column.scales, transposed.scales)
    assert torch.equal(by_column.dequantize(), transposed.dequantize().T.reshape(x.shape))
    assert quantize(x, SIGNED, None).scales.shape == (1,)
    assert torch.equal(quantize(x, SIGNED, None).codes, quantize(x, SIGNED, 10**9).codes)
    assert by_column.nbytes == 240 + 4 * 8


@pytest.mark.parametrize("block", [1, 7, 256, "row", "column", None])
def test_small_and_empty_shapes(block: Block) -> None:
    for shape, numbers in (((), 1), ((1,), 1), ((0,), 0), ((3, 0), 0), ((0, 4), 0), ((2, 3, 0, 5), 0)):
        x = torch.full(shape, -0.3)
        for rounding in ("nearest", "stochastic"):
            quantized = quantize(x, SIGNED, block, rounding)
            assert quantized.codes.shape == x.shape
            assert quantized.codes.numel() == numbers
            assert torch.equal(quantized.dequantize(), x)


@pytest.mark.parametrize("block", [16, "row", "column", None])
def test_layout_does_not_matter(block: Block) -> None:
    x = normal(6, 4, 5, 5)
    wanted = quantize(x, SIGNED, block)
    strided = torch.empty(6, 4, 5, 10)[..., ::2].copy_(x)
    for same in (x.to(memory_format=torch.channels_last), x.mT.contiguous().mT, strided):
        assert not same.is_contiguous()
        again = quantize(same, SIGNED, block)
        assert torch.equal(again.codes, wanted.codes)
        assert torch.equal(again.scales, wanted.scales)
        assert again.codes.is_contiguous()
        assert again.dequantize().is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_other_dtypes_are_quantized_from_their_float32_values(dtype: torch.dtype) -> None:
    x = normal(300).to(dtype).requires_grad_(dtype.itemsize > 1)
    quantized = quantize(x, SIGNED, 64)
    assert torch.equal(quantized.codes, quantize(x.detach().float(), SIGNED, 64).codes)
    assert not quantized.dequantize().requires_grad


def test_zeros_and_subnormal_blocks_are_zeros() -> None:
    x = torch.zeros(4, 64)
    x[1] = 2.0**-127
    x[2, 5], x[2, 6] = -0.0, -(2.0**-149)
    x[3, 1] = -(2.0**-126)
    quantized = quantize(x, SIGNED, 64)
    assert quantized.scales.tolist() == [0.0, 0.0, 0.0, -(2.0**-126)]
    assert not torch.signbit(quantized.scales[:3]).any()
    assert not quantized.dequantize()[:3].any()
    assert quantized.dequantize()[3, 1] == -(2.0**-126)


@pytest.mark.parametrize("values", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_one_inf_or_nan_spoils_nothing_but_itself(values: torch.Tensor) -> None:
    x = normal(512)
    wanted = quantize(x, values).dequantize()
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoiled = x.clone()
        position = int(x[:256].abs().argmin())
        spoiled[position] = bad
        quantized = quantize(spoiled, values)
        again = quantized.dequantize()
        others = torch.arange(512) != position
        assert torch.equal(again[others], wanted[others])
        extreme = quantized.scales[0].abs()
        if bad == torch.inf:
            assert 0.99 * extreme <= again[position] <= extreme
        elif bad == -torch.inf and values is SIGNED:
            assert -extreme <= again[position] <= -0.99 * extreme
        else:
            assert again[position] == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinities_without_a_finite_neighbor_stay_large(sign: float) -> None:
    for company in (0.0, 2.0**-127, torch.nan):
        x = torch.tensor([company, sign * torch.inf, -sign * torch.inf, company])
        quantized = quantize(x, SIGNED)
        assert quantized.scales.tolist() == [sign * LARGEST]
        assert quantized.dequantize()[1] == sign * LARGEST
        assert quantized.dequantize()[2] * sign < -0.99 * LARGEST
    alone = quantize(torch.tensor([0.0, -torch.inf]), UNSIGNED)
    assert not alone.dequantize().any()
    assert quantize(torch.tensor([0.0, torch.inf]), UNSIGNED).dequantize()[1] == LARGEST


def test_stochastic_rounding_has_no_value_below_the_first_of_a_map_without_minus_one() -> None:
    """Between the lowest value and minus the scale there is one value only: the exception that is documented."""
    x = torch.tensor([1.0] + [-0.9] * 255)
    again = quantize(x, codebook("dynamic", bits=2), 256, "stochastic").dequantize()
    assert (again[1:] == codebook("dynamic", bits=2)[0]).all()


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    x = normal(64).repeat(4000, 1)
    first, again = (quantize(x, SIGNED, "row", "stochastic", torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first.codes, again.codes)
    values = first.dequantize().double()
    # Six standard errors; where all draws agree (values of the codebook), equal.
    off = (values.mean(dim=0) - x[0].double()).abs()
    assert (off <= 6 * values.std(dim=0) / 4000**0.5 + 1e-7).all()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(7, 331)
    wanted = [quantize(x, SIGNED, block) for block in (16, "row", "column", None)]
    monkeypatch.setattr("narrowgauge.storage._blockwise._CPU_CHUNK", 64)
    for block, whole in zip((16, "row", "column", None), wanted, strict=True):
        again = quantize(x, SIGNED, block)
        assert torch.equal(again.codes, whole.codes)
        assert torch.equal(again.scales, whole.scales)
        assert torch.equal(again.dequantize(), whole.dequantize())


@pytest.mark.gpu
def test_the_gpu_gives_the_same_codes() -> None:
    x = normal(300, 512) * 10.0 ** normal(300, 1, seed=1)
    x[3, 4], x[5, 6], x[7, 8] = torch.inf, torch.nan, -torch.inf
    for name, signed in EIGHT_BITS:
        values = codebook(name, signed)
        for block in (16, 256, "row", "column", None):
            here, there = quantize(x, values, block), quantize(x.cuda(), values, block)
            assert torch.equal(here.codes, there.codes.cpu())
            assert torch.equal(here.scales, there.scales.cpu())
            assert torch.equal(here.dequantize(), there.dequantize().cpu())


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    n = (1 << 31) + 1000
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs a GPU with 60 GiB of memory")
    x = torch.empty(n, device="cuda").normal_(generator=torch.Generator("cuda").manual_seed(0))
    quantized = quantize(x, SIGNED)
    for first in (0, (1 << 31) - 2560, n - 1000 - n % 256):
        first -= first % 256
        part = quantize(x[first:], SIGNED) if first else quantize(x[:4096], SIGNED)
        count = part.codes.numel()
        assert torch.equal(quantized.codes[first : first + count], part.codes)
    again = quantized.dequantize()
    assert float((again[-2000:] - x[-2000:]).abs().max()) < 0.05
    del again
    tensor = quantize(x, SIGNED, None)
    assert float(tensor.scales.abs()) == float(torch.maximum(x.max(), -x.min()))
    assert bool((tensor.codes[-1000:] == Coder.of(SIGNED.cuda()).encode(x[-1000:] * (1 / tensor.scales))).all())


def test_bad_arguments_are_named() -> None:
    for block in (0, True, "rows"):
        with pytest.raises(ValueError, match=r"block_size must be an integer of at least 1, .*got "):
            quantize(torch.ones(3), SIGNED, block)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^codebook must "):
        quantize(torch.ones(3), torch.ones(300))
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', got 'up'"):
        quantize(torch.ones(3), SIGNED, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must be a tensor of floats, got torch\.int64"):
        quantize(torch.arange(3), SIGNED)


def test_codes_and_formats_are_read_from_a_file_as_they_were() -> None:
    file = io.BytesIO()
    made = quantize(torch.randn(600), "dynamic", block_size=64)
    torch.save({"codes": made, "format": FP4_E2M1}, file)
    file.seek(0)
    found = torch.load(file)
    assert torch.equal(found["codes"].dequantize(), made.dequantize())
    assert found["format"] == FP4_E2M1
