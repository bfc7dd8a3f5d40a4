"""Encoding into a codebook: to the nearest value, or stochastically to one of the two neighbors.

Finding the nearest of 256 values is a search among 255 boundaries. A boundary is the midpoint of two neighbors,
and the midpoint of two float32 numbers need not be one: rounding it the right way once, here, makes the search
exact for every float32, ties included.

Source: 8-bit Optimizers via Block-wise Quantization, Equation 3.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.formats._codebooks import checked, codebook


@dataclass(frozen=True, eq=False)
class Coder:
    """A codebook made ready for use: its values and the boundaries between them.

    Attributes:
        values: float32 tensor (n,), ascending; code k means ``values[k]``.
        boundaries: float32 tensor (n - 1,): x has the code that counts the boundaries below x. That is the
            nearest value exactly, for every float32 x; a tie goes to the value nearer to zero.
        lowest: the first value, as a number of the host: not below 0 without negative values, -1 in a symmetric
            codebook.
    """

    values: Tensor
    boundaries: Tensor
    lowest: float

    @classmethod
    def of(cls, values: Tensor) -> Coder:
        """The coder of any codebook.

        Args:
            values: ascending float32 tensor (n,), n from 2 to 256, distinct values in [-1, 1], 0 and 1 among them.

        Raises:
            ValueError: for anything else.
        """
        return cls.positive(checked(values))

    @classmethod
    def positive(cls, values: Tensor) -> Coder:
        """The coder of values that need not include 0, for what is never meant to be zero; nothing is checked."""
        host = values.detach().cpu().numpy()
        return cls(values, torch.from_numpy(_boundaries(host)).to(values.device), float(host[0]))

    def encode(self, x: Tensor) -> Tensor:
        """Codes (uint8) of the nearest values, in x's shape; NaN gets the code of zero."""
        x = x.to(torch.float32).nan_to_num(nan=0.0).contiguous()
        return torch.bucketize(x, self.boundaries, out_int32=True).to(torch.uint8)

    def encode_with_bits(self, x: Tensor, bits: Tensor) -> Tensor:
        """Codes (uint8) of one of the two values around x: the upper with the share of the gap that x has covered.

        The expected value is x, to 2^-24 of the gap and to the rounding of float32; a value of the codebook keeps
        its code, what lies outside gets the outermost code, NaN that of zero.

        Args:
            x: float tensor of any shape, taken in float32.
            bits: int64 tensor of x's shape with uniform values in [0, 2^32).
        """
        x = x.to(torch.float32).nan_to_num(nan=0.0).contiguous()
        upper = torch.bucketize(x, self.values, out_int32=True).clamp_(1, len(self.values) - 1)
        low, high = self.values[upper - 1].to(torch.float64), self.values[upper].to(torch.float64)
        uniform = (bits >> 8).to(torch.float64) * 2.0**-24
        # x = high covers the whole gap and is above every uniform number; x below the first value, none.
        return (upper - (uniform >= (x.to(torch.float64) - low) / (high - low)).to(torch.int32)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values (float32) of the codes, in their shape."""
        return self.values[codes.to(torch.int32)]


@functools.lru_cache(maxsize=64)
def coder(name: str, signed: bool, device: torch.device, bits: int = 8) -> Coder:
    """The coder of a named codebook on a device, made once."""
    made = Coder.of(codebook(name, signed, bits))
    return Coder(made.values.to(device), made.boundaries.to(device), made.lowest)


def _boundaries(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Float32 thresholds b so that `count(b < x)` is the nearest value's index, ties towards zero.

    The midpoint of two float32 values need not be a float32. For positive midpoints the largest float32 not
    above it decides; for negative ones the largest float32 below it, which sends a tie upwards, to zero.
    """
    middles = (values[:-1].astype(np.float64) + values[1:].astype(np.float64)) / 2
    rounded = middles.astype(np.float32)
    too_high = (rounded > middles) | ((middles < 0) & (rounded == middles))
    return np.where(too_high, np.nextafter(rounded, np.float32(-np.inf)), rounded).astype(np.float32)
