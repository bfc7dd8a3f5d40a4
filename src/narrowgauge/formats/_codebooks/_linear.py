"""The linear map: evenly spaced codes, what an int8 with a scale is.

Its absolute error is the same everywhere, so its relative error is without bound towards zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats._codebooks._map import CodebookMap


def _linear(signed: bool, bits: int) -> Tensor:
    """Unsigned: 2^bits values from 0 to 1. Signed: k / (2^(bits-1) - 1), one value less, so that 0 is exact."""
    if not signed:
        return torch.linspace(0.0, 1.0, 1 << bits, dtype=torch.float32, device="cpu")
    largest = (1 << bits - 1) - 1
    return torch.arange(-largest, largest + 1, dtype=torch.float32, device="cpu") / largest


MAPS = (CodebookMap("linear", "evenly spaced, as an int8 with a scale", "8-bit Optimizers, Appendix F", _linear),)
