"""The dynamic tree: the paper's data type, bit by bit.

A sign bit; z zeros, which scale by 10^-z; an indicator bit, the first that is one; and the bits left over, a
fraction f of b bits that means f / (2^b - 1), so that the precision is 1/63 where all six are left. A code without
an indicator bit is 10^-7 itself, and so is one without a fraction 10^-z. A fraction of zeros is zero whatever its
exponent: 256 codes mean 245 numbers. The public implementation spends those codes on midpoints instead: see the
`dynamic` map, whose fraction says which cell of its decade is meant.

Without negative numbers the sign bit becomes one more fraction bit for every exponent (Section 2.2).

Source: 8-bit Optimizers via Block-wise Quantization, Section 1.3, Figure 2, and Section 2.2; Dettmers 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats._codebooks._map import CodebookMap


def _dynamic_tree(signed: bool, bits: int) -> Tensor:
    """All numbers that some code means, each once."""
    tree = bits - 1
    positive = set()
    for zeros in range(tree + 1):
        width = max(tree - 1 - zeros, 0) + (0 if signed else 1)
        largest = (1 << width) - 1
        fractions = [f / largest for f in range(largest + 1)] if width else [1.0]
        positive |= {10.0**-zeros * fraction for fraction in fractions}
    values = positive | {-value for value in positive} if signed else positive
    return torch.tensor(sorted(values), dtype=torch.float64, device="cpu").to(torch.float32)


MAPS = (
    CodebookMap(
        "dynamic_tree",
        "the paper's bit-level data type: sign, zeros as a decimal exponent, indicator, fraction",
        "8-bit Optimizers, Section 1.3, Figure 2",
        _dynamic_tree,
        signed_bits=range(3, 9),  # two bits are a sign and an indicator: no code is left to mean zero
    ),
)
