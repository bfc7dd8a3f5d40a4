"""Codebooks: the dynamic map is the public one, and encoding finds the nearest value of every float32."""

import hashlib

import pytest
import torch

from narrowgauge.formats import Coder, codebook

CHECKSUMS = {
    True: "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    False: "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_the_public_one(signed: bool) -> None:
    values = codebook("dynamic", signed)
    assert hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest() == CHECKSUMS[signed]
    assert len(values) == 256
    assert (values.diff() > 0).all()
    assert (values[127] == 0) if signed else (values[0] == 0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_survive_decoding_and_encoding(signed: bool) -> None:
    coder = Coder.of(codebook("dynamic", signed))
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(coder.encode(coder.decode(codes)), codes)


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_is_nearest_with_ties_towards_zero(signed: bool) -> None:
    """Float32 patterns of [-1, 1] in strides, and every boundary with its neighbours, by brute force in float64."""
    coder = Coder.of(codebook("dynamic", signed))
    x = torch.arange(0, 0x3F800001, 30_011, dtype=torch.int32).view(torch.float32)
    around = [torch.nextafter(coder.boundaries, torch.tensor(side)) for side in (-2.0, 2.0)]
    x = torch.cat([x, -x, coder.boundaries, *around, torch.tensor([0.0, -0.0, 1.0, -1.0])])
    values = coder.values.to(torch.float64)
    distance = (x.to(torch.float64)[:, None] - values).abs()
    # Among equally near values the one of smaller magnitude comes first.
    order = values.abs().argsort()
    nearest = order[distance[:, order].argmin(dim=1)]
    assert torch.equal(coder.encode(x).to(torch.int64), nearest)


def test_nan_and_what_lies_outside_have_codes_too() -> None:
    coder = Coder.of(codebook("dynamic"))
    codes = coder.encode(torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0]))
    assert coder.decode(codes).tolist() == [0.0, 1.0, float(coder.values[0]), 1.0]


def test_ties_at_representable_midpoints_go_to_zero_on_both_sides() -> None:
    coder = Coder.of(torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]))
    codes = coder.encode(torch.tensor([-0.75, -0.25, 0.25, 0.75]))
    assert coder.decode(codes).tolist() == [-0.5, 0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.0, 1.0], dtype=torch.float64),
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([0.0]),
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([1.0, 0.0]),
        torch.tensor([0.5, 1.0]),
        torch.tensor([0.0, torch.inf]),
        torch.linspace(0, 1, 257),
    ],
)
def test_what_is_no_codebook_is_refused(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^codebook: "):
        Coder.of(values)


def test_unknown_names_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="name: got 'dynamical', takes one of 'dynamic', 'dynamic_tree'"):
        codebook("dynamical")
    with pytest.raises(ValueError, match="bits: got 9, takes 2 to 8 for the map 'dynamic' with sign"):
        codebook("dynamic", bits=9)
    with pytest.raises(ValueError, match="bits: got 2, takes 3 to 8 for the map 'dynamic_tree' with sign"):
        codebook("dynamic_tree", bits=2)
    with pytest.raises(ValueError, match="bits: got 7, takes 8 for the map 'fp8_e4m3' without sign"):
        codebook("fp8_e4m3", signed=False, bits=7)
    with pytest.raises(ValueError, match="data: the map 'linear' is not made from data"):
        codebook("linear", data=torch.ones(3))
