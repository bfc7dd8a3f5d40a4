"""Codebooks: each is what its definition says."""

import hashlib
import math

import numpy as np
import pytest
import torch

from narrowgauge.formats import (
    FP8_E4M3,
    FP8_E5M2,
    CodebookMap,
    codebook,
    codebook_map,
    codebook_names,
    register_codebook,
)
from narrowgauge.formats import _codebooks as registry

CHECKSUMS = {
    True: "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    False: "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
ALL = [
    (name, signed, bits)
    for name in codebook_names()
    for signed in (True, False)
    for bits in (codebook_map(name).signed_bits if signed else codebook_map(name).unsigned_bits)
]


@pytest.mark.parametrize(("name", "signed", "bits"), ALL)
def test_a_codebook_is_sorted_within_one_and_holds_zero_and_one(name: str, signed: bool, bits: int) -> None:
    values = codebook(name, signed, bits)
    assert values.dtype == torch.float32
    assert 2 <= len(values) <= 2**bits
    assert (values.diff() > 0).all()
    assert values[-1] == 1
    assert int((values == 0).sum()) == 1
    assert (values[0] < 0) == signed
    negative = values[values < 0]
    if signed:
        # Every negative value has its positive; where there is a value more than codes leave room for, it is 1.
        assert torch.isin(-negative, values).all()
        assert int((values > 0).sum()) - len(negative) == (1 if "dynamic" in name and "tree" not in name else 0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_the_public_one(signed: bool) -> None:
    values = codebook("dynamic", signed)
    assert hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest() == CHECKSUMS[signed]
    assert len(values) == 256
    assert (values[127] == 0) if signed else (values[0] == 0)


@pytest.mark.parametrize("bits", range(2, 9))
def test_dynamic_maps_give_every_decade_its_cells(bits: int) -> None:
    """2^i midpoints in decade i counted from the smallest, or from the largest in the inverse map."""
    for name, order in (("dynamic", range(bits - 1)), ("inverse_dynamic", [*range(bits - 1)][::-1])):
        for signed in (True, False):
            values = codebook(name, signed, bits).double()
            for decade, i in enumerate(order):
                low = 10.0 ** (decade - bits + 1)
                inside = values[(values > low) & (values < 10 * low)]
                count = 2**i if signed else 2 ** (i + 1)
                wanted = low * (1 + 9 * (torch.arange(count, dtype=torch.float64) + 0.5) / count)
                assert torch.allclose(inside, wanted, rtol=3e-7, atol=0)


def test_linear_maps_are_evenly_spaced() -> None:
    assert torch.equal(codebook("linear", False), torch.linspace(0, 1, 256))
    for bits in range(2, 9):
        largest = 2 ** (bits - 1) - 1
        wanted = torch.arange(-largest, largest + 1, dtype=torch.float64) / largest
        assert torch.equal(codebook("linear", True, bits), wanted.float())


def tree_value(code: int, bits: int, signed: bool) -> float:
    """The paper's Figure 2, read bit by bit; without sign, every fraction has a bit more."""
    text = f"{code:0{bits}b}"
    sign, rest = (-1.0 if text[0] == "1" else 1.0, text[1:]) if signed else (1.0, text)
    tree = rest if signed else rest[:-1]
    zeros = len(tree) - len(tree.lstrip("0"))
    fraction = tree[zeros + 1 :] + ("" if signed else rest[-1])
    share = int(fraction, 2) / (2 ** len(fraction) - 1) if fraction else 1.0
    return sign * share * 10.0**-zeros


@pytest.mark.parametrize(("signed", "bits"), [(signed, bits) for signed in (True, False) for bits in range(3, 9)])
def test_the_dynamic_tree_is_the_papers_data_type_bit_by_bit(signed: bool, bits: int) -> None:
    wanted = sorted({tree_value(code, bits, signed) + 0.0 for code in range(2**bits)})
    assert codebook("dynamic_tree", signed, bits).tolist() == torch.tensor(wanted).tolist()


def test_the_dynamic_tree_reaches_as_far_and_as_fine_as_the_paper_says() -> None:
    values = codebook("dynamic_tree")
    assert len(values) == 245
    assert float(values[values > 0][0]) == pytest.approx(1e-7)
    assert float(values[-1] - values[-2]) == pytest.approx(1 / 63)


def test_the_quantile_map_of_a_normal_is_equation_5() -> None:
    from statistics import NormalDist

    inverse = NormalDist().inv_cdf
    middles = [(inverse(i / 257) + inverse((i + 1) / 257)) / 2 for i in range(1, 256)]
    wanted = torch.tensor(middles, dtype=torch.float64) / middles[-1]
    assert torch.allclose(codebook("quantile").double(), wanted, rtol=0, atol=1e-7)
    folded = [(inverse((1 + i / 257) / 2) + inverse((1 + (i + 1) / 257) / 2)) / 2 for i in range(1, 256)]
    wanted = torch.tensor([0.0, *folded], dtype=torch.float64) / folded[-1]
    assert torch.allclose(codebook("quantile", signed=False).double(), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_the_quantile_map_of_data_is_equation_5_of_its_quantiles(signed: bool, bits: int) -> None:
    x = torch.randn(20_001, generator=torch.Generator().manual_seed(0)) ** 3
    x = x if signed else x.abs()
    values = codebook("quantile", signed, bits, data=x)
    normalised = x.double().numpy() / float(x.abs().max())
    quantiles = np.quantile(normalised, np.arange(1, 2**bits + 1) / (2**bits + 1))
    middles = (quantiles[:-1] + quantiles[1:]) / 2
    middles[np.abs(middles).argmin()] = 0.0
    np.testing.assert_allclose(values.numpy(), np.append(middles, 1.0), rtol=1e-6, atol=1e-12)


def test_the_quantile_map_of_data_with_repetitions_has_fewer_values() -> None:
    values = codebook("quantile", data=torch.tensor([0.0] * 50 + [2.0] * 50 + [4.0]))
    assert len(values) < 12
    assert torch.isin(torch.tensor([0.0, 0.5, 1.0]), values).all()
    assert codebook("quantile", signed=False, data=torch.tensor([[-1.0, torch.nan, torch.inf, 5.0]]))[-1] == 1
    # Mirrored data give the mirrored map, but for the 1 that is added.
    data = torch.cat([torch.full((1000,), -0.1), torch.ones(10)])
    found, mirrored = codebook("quantile", data=data), codebook("quantile", data=-data)
    assert torch.isin(torch.tensor([-0.1, 0.0, 1.0]), found).all()
    assert torch.equal(mirrored[mirrored < 1], -found.flip(0))
    for nothing in (torch.zeros(3), torch.ones(0), torch.tensor([torch.inf])):
        with pytest.raises(ValueError, match="data must have finite values other than zero"):
            codebook("quantile", data=nothing)


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2], ids=lambda fmt: fmt.name)
def test_float_maps_are_all_finite_numbers_of_the_format(fmt) -> None:
    everything = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()
    finite = (everything[torch.isfinite(everything)] / fmt.max).float().unique()
    assert torch.equal(codebook(fmt.name), finite)
    assert torch.equal(codebook(fmt.name, signed=False), finite[finite >= 0])


def test_a_codebook_of_ones_own_is_known_by_its_name() -> None:
    def powers(signed: bool, bits: int) -> torch.Tensor:
        half = 2.0 ** -torch.arange(2 ** (bits - 1), dtype=torch.float32).flip(0)
        return torch.cat([-half.flip(0)[1:], torch.zeros(1), half]) if signed else torch.cat([torch.zeros(1), half])

    try:
        register_codebook(CodebookMap("powers", "powers of two", "here", powers, signed_bits=(3, 4)))
        assert "powers" in codebook_names()
        assert codebook("powers", bits=3).tolist() == [-0.5, -0.25, -0.125, 0.0, 0.125, 0.25, 0.5, 1.0]
        with pytest.raises(ValueError, match=r"bits must be 3, 4 for the map 'powers' with sign.*, got 8"):
            codebook("powers")
        with pytest.raises(ValueError, match=r"name must .*got 'powers', which is taken"):
            register_codebook(CodebookMap("powers", "", "", powers))
    finally:
        registry._MAPS.pop("powers", None)
    for bad in ("", "Dynamic"):
        with pytest.raises(ValueError, match=r"name must .*got"):
            register_codebook(CodebookMap(bad, "", "", powers))
    for widths in ((), (1, 2)):
        with pytest.raises(ValueError, match=r"bits of the map 'wide' must be some of 2 to 8, got "):
            register_codebook(CodebookMap("wide", "", "", powers, signed_bits=widths, unsigned_bits=()))
    with pytest.raises(ValueError, match="codebook must have ascending"):
        register_codebook(CodebookMap("broken", "", "", lambda signed, bits: torch.tensor([0.0, math.nan])))
    assert "broken" not in codebook_names()


def test_unknown_names_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of 'dynamic', 'dynamic_tree'.*, got 'dynamical'"):
        codebook("dynamical")
    with pytest.raises(ValueError, match=r"bits must be 3 to 8 for the map 'dynamic_tree' with sign.*, got 2"):
        codebook("dynamic_tree", bits=2)
    with pytest.raises(ValueError, match="data must be None: the map 'linear' is not made from data"):
        codebook("linear", data=torch.ones(3))


def test_inside_torch_compile_a_codebook_is_the_same() -> None:
    assert torch.equal(torch.compile(lambda: codebook("dynamic") * 1)(), codebook("dynamic"))
