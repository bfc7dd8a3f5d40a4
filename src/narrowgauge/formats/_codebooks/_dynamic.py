"""The dynamic maps: decades of linear codes, as the public 8-bit optimizers train with, and their inverse.

The bits after the sign are zeros that count decades, an indicator bit, and a fraction; the fewer zeros, the more
bits are left for the fraction. So each decade up from the smallest is resolved twice as finely, and the values near
1, which move the weights most, best of all. Without a sign the freed bit goes to every fraction.

The inverse turns that round: the smallest decade is resolved best.

Source: 8-bit Optimizers via Block-wise Quantization, Sections 1.3 and 2.2, Appendix F.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats._codebooks._map import CodebookMap


def _dynamic(signed: bool, bits: int) -> Tensor:
    """Decade i = 0 .. bits - 2 in C_i = 2^i cells where a sign takes a bit, 2^(i+1) where none does."""
    return _decades([1 << (decade if signed else decade + 1) for decade in range(bits - 1)], signed)


def _inverse_dynamic(signed: bool, bits: int) -> Tensor:
    """The same decades with their cells in reverse order: the base is the smallest decade, zeros lead upwards."""
    return _decades([1 << (decade if signed else decade + 1) for decade in reversed(range(bits - 1))], signed)


def _decades(cells: list[int], signed: bool) -> Tensor:
    """The midpoints of equal cells of [0.1, 1], scaled into each decade, with 0 and 1; the signed map has no -1.

    All in float32, the order of operations included: codes written by others must decode to the same numbers.
    """
    positive = []
    for decade, count in enumerate(cells):
        # torch's float32 linspace, not numpy's: they differ in the last bit and the checksum is of torch's.
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2.0
        positive.append(10.0 ** (decade - len(cells) + 1) * middles)
    half = torch.cat(positive)
    values = torch.cat([half, -half] if signed else [half])
    return torch.cat([values, torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]).sort().values


MAPS = (
    CodebookMap(
        "dynamic",
        "decades, the largest resolved best; what the public 8-bit optimizers train with",
        "8-bit Optimizers, Sections 1.3 and 2.2",
        _dynamic,
    ),
    CodebookMap(
        "inverse_dynamic",
        "decades, the smallest resolved best",
        "8-bit Optimizers, Appendix F.1",
        _inverse_dynamic,
    ),
)
