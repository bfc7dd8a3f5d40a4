"""Pieces of a matrix by an absmax that is agreed on: the codes of the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.linear import quantize
from narrowgauge.linear._pieces import encode, find_absmax

FORMATS = ("int8", "e4m3", "e5m2")
# Rows of each rank's piece of two matrices: uneven, and none.
RANKS = ((13, 5), (13, 1), (7, 0))


def matrices(bad: float | None, device: str) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(sum(rows), 24, generator=random).bfloat16() for rows in zip(*RANKS, strict=True)]
    if bad is not None:
        made[0][20, 3] = bad  # on the second rank
    return [x.to(device) for x in made]


def check(format: str, bad: float | None, device: str) -> None:
    wholes = matrices(bad, device)
    shares = [x.split([rank[at] for rank in RANKS]) for at, x in enumerate(wholes)]
    pieces = [[share[rank] for share in shares] for rank in range(len(RANKS))]
    agreed = torch.stack([find_absmax(own, format) for own in pieces]).amax(0)
    coded = [encode(own, (13, 5), agreed, format) for own in pieces]
    for at, whole in enumerate(wholes):
        wanted = quantize(whole, "tensor", format)
        found = [codes[at] for codes in coded]
        rows = [rank[at] for rank in RANKS]
        assert [tuple(codes.shape) for codes, _ in found] == [((13, 5)[at], 24)] * len(RANKS)
        bits = torch.cat([codes.view(torch.uint8)[:own] for (codes, _), own in zip(found, rows, strict=True)])
        assert torch.equal(bits, wanted.codes.view(torch.uint8))
        assert not any(codes.view(torch.uint8)[own:].any() for (codes, _), own in zip(found, rows, strict=True))
        for _, scale in found:
            assert scale.shape == (1, 1)
            torch.testing.assert_close(scale, wanted.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [None, torch.nan, -torch.nan, -torch.inf])
def test_pieces_have_the_codes_of_the_whole(format: str, bad: float | None) -> None:
    check(format, bad, "cpu")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [None, torch.nan, -torch.inf])
def test_kernels_give_pieces_the_same(kernels: str, format: str, bad: float | None) -> None:
    check(format, bad, kernels)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, -torch.inf])
def test_what_is_not_finite_is_one_number_to_all(bad: float) -> None:
    """Whatever bits a NaN has, the maximum over ranks finds it."""
    piece = torch.ones(3, 5)
    piece[1, 2] = bad
    found = find_absmax([piece, piece[:0], torch.zeros(2, 5)], "int8").view(torch.float32)
    assert found.tolist() == [[torch.inf] * 4, [0.0] * 4, [0.0] * 4]
