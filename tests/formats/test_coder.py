"""Encoding: the nearest value of every float32, by brute force; stochastic encoding by its probabilities."""

from collections.abc import Iterator

import pytest
import torch

from narrowgauge.formats import Coder, codebook, codebook_map, codebook_names

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE = 0x3F800000  # the bits of 1.0: float32 patterns up to it are the numbers of [0, 1]
ALL = [
    (name, signed, bits)
    for name in codebook_names()
    for signed in (True, False)
    for bits in (codebook_map(name).signed_bits if signed else codebook_map(name).unsigned_bits)
]
EIGHT_BITS = [case for case in ALL if case[2] == 8]


def nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Codes by float64 distances to all values; among equally near ones, that of smaller magnitude.

    The distances of a float32 to the values on both sides of it are exact in float64 wherever they can be close to
    each other: near a midpoint, x and the values next to it are within a factor of two or one of them is 0.
    """
    values = values.to(torch.float64)
    order = values.abs().argsort()
    return order[(x.to(torch.float64)[:, None] - values[order]).abs().argmin(dim=1)]


def patterns(stride: int, chunk: int) -> Iterator[torch.Tensor]:
    """Float32 numbers of [-1, 1] by their bits, in chunks."""
    for start in range(0, ONE + 1, chunk * stride):
        bits = torch.arange(start, min(start + chunk * stride, ONE + 1), stride, dtype=torch.int32, device=DEVICE)
        x = bits.view(torch.float32)
        yield torch.cat([x, -x])


def coder_of(name: str, signed: bool, bits: int) -> Coder:
    return Coder.of(codebook(name, signed, bits).to(DEVICE))


@pytest.mark.parametrize(("name", "signed", "bits"), ALL)
def test_encoding_is_nearest_with_ties_towards_zero(name: str, signed: bool, bits: int) -> None:
    """Float32 patterns of [-1, 1] in strides, and every boundary and value with its neighbors, by brute force."""
    coder = coder_of(name, signed, bits)
    edges = torch.cat([coder.boundaries, coder.values])
    around = [torch.nextafter(edges, edges.new_tensor(side)) for side in (-2.0, 2.0)]
    x = torch.cat([*patterns(130_003, 1 << 20), edges, *around, edges.new_tensor([0.0, -0.0, 1.0, -1.0])])
    assert torch.equal(coder.encode(x).long(), nearest(x, coder.values))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "signed", "bits"), EIGHT_BITS)
def test_encoding_is_nearest_for_every_float32(name: str, signed: bool, bits: int) -> None:
    """All 2 x 1,065,353,217 patterns of [-1, 1], each against the two values that enclose it, in float64.

    No other value can be nearer than both. Distances as in `nearest`.
    """
    coder = coder_of(name, signed, bits)
    values = coder.values.to(torch.float64)
    for x in patterns(1, 1 << 24):
        wide = x.to(torch.float64)
        upper = torch.searchsorted(values, wide).clamp(1, len(values) - 1)
        low, high = values[upper - 1], values[upper]
        to_low, to_high = wide - low, high - wide
        takes_low = (to_low < to_high) | ((to_low == to_high) & (low.abs() < high.abs()))
        assert torch.equal(coder.encode(x).long(), torch.where(takes_low, upper - 1, upper))


@pytest.mark.parametrize(("name", "signed", "bits"), ALL)
def test_codes_survive_decoding_and_encoding(name: str, signed: bool, bits: int) -> None:
    coder = coder_of(name, signed, bits)
    codes = torch.arange(len(coder.values), dtype=torch.uint8, device=DEVICE)
    assert torch.equal(coder.encode(coder.decode(codes)), codes)
    random = torch.randint(0, 1 << 32, codes.shape, device=DEVICE)
    for bits_ in (random, torch.zeros_like(random), torch.full_like(random, (1 << 32) - 1)):
        assert torch.equal(coder.encode_with_bits(coder.decode(codes), bits_), codes)


@pytest.mark.parametrize(("name", "signed", "bits"), EIGHT_BITS)
def test_stochastic_encoding_goes_up_with_exactly_the_covered_share(name: str, signed: bool, bits: int) -> None:
    """All 2^16 upper halves of the random word: those that go up are the share of the gap, counted."""
    coder = coder_of(name, signed, bits)
    random = (torch.arange(1 << 16, dtype=torch.int64, device=DEVICE) << 16)[:, None]
    gaps = torch.randint(0, len(coder.values) - 1, (40,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    low, high = coder.values[gaps], coder.values[gaps + 1]
    x = low + torch.rand(40, generator=torch.Generator().manual_seed(1)).to(DEVICE) * (high - low)
    codes = coder.encode_with_bits(x.expand(1 << 16, 40), random.expand(1 << 16, 40)).long()
    assert ((codes == gaps) | (codes == gaps + 1)).all()
    share = (x.double() - low.double()) / (high.double() - low.double())
    assert ((codes - gaps).double().mean(dim=0) - share).abs().max() <= 2.0**-16


def test_nan_and_what_lies_outside_have_codes_too() -> None:
    coder = Coder.of(codebook("dynamic"))
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0, -7.0])
    wanted = [0.0, 1.0, float(coder.values[0]), 1.0, float(coder.values[0])]
    assert coder.decode(coder.encode(x)).tolist() == wanted
    for word in (0, 1 << 31, (1 << 32) - 1):
        assert coder.decode(coder.encode_with_bits(x, torch.full(x.shape, word))).tolist() == wanted


def test_ties_at_representable_midpoints_go_to_zero_on_both_sides() -> None:
    coder = Coder.of(torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]))
    codes = coder.encode(torch.tensor([-0.75, -0.25, 0.25, 0.75]))
    assert coder.decode(codes).tolist() == [-0.5, 0.0, 0.0, 0.5]


def test_what_is_no_codebook_is_refused() -> None:
    rows = ([0.0], [0.0, 0.0, 1.0], [1.0, 0.0], [0.5, 1.0], [0.0, 0.5], [-1.5, 0.0, 1.0], [0.0, torch.inf])
    bad = [torch.tensor(row) for row in (*rows, [torch.nan, 0.0, 1.0], [[0.0, 1.0]])]
    for values in (*bad, torch.tensor([0.0, 1.0]).double(), torch.linspace(0, 1, 257)):
        with pytest.raises(ValueError, match=r"^codebook must "):
            Coder.of(values)
