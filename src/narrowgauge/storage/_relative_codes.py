"""Codes of a first moment in units of the root of its second moment.

An element of m is never much larger than the root of the same element of v, and the update is their quotient.
In that unit all elements of a block have about one scale, whatever their gradients' scales are: a few evenly
spaced codes serve them, with one number a block. And whatever is lost is lost in proportion to the element's
own step: what a storage hands over to the weight is then never more than a fixed share of a step.

The unit is the largest power of two that is not above the root. Its exponent is half of v's, a shift of
integers, and dividing by it is exact, so that codes are the same on every device.

What is fixed here is fixed for every kernel, bit for bit:

- The unit of an element of v with biased exponent E is 2^(floor((E + 127) / 2) - 127); of a zero, 2^-64.
- q is the element over its unit, and zero for NaN. The block's largest finite |q| is kept in float32; where it is
  below 2^-126 the block is zeros. Infinities count as the largest; where there is no other, as float32's largest.
- 8 bits: |code| = round(|q| * (127 / largest)), ties to even, quotient and product rounded to float32. 4 bits: the
  nearest of the magnitudes 0, 1/2, 1, 3/2, 2, 3, 4, 6 to |q| * (6 / largest), ties to the smaller. The elements
  with the largest |q| have the outermost codes. The code's highest bit is the sign.
- A code is its number times (largest / 127) or (largest / 6), rounded to float32, times the unit; an outermost
  code is the largest itself times the unit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import chunks, from_blocks, to_blocks

_SMALLEST = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unit_of(v: Tensor) -> Tensor:
    """The unit for each element of a second moment: float32 powers of two in its shape."""
    return (((_exponent(v) + 127) >> 1) << 23).view(torch.float32)


def _over_unit(v: Tensor) -> Tensor:
    """1 over the unit, exactly."""
    return ((254 - ((_exponent(v) + 127) >> 1)) << 23).view(torch.float32)


def _exponent(v: Tensor) -> Tensor:
    return v.contiguous().view(torch.int32) >> 23


@dataclass(frozen=True)
class RelativeCodes:
    """Codes of 8 or of 4 bits.

    Attributes:
        bits: of a code.
    """

    bits: int

    @property
    def sign(self) -> int:
        """The bit of a code that is its sign, and the number of magnitudes."""
        return 1 << (self.bits - 1)

    @property
    def outermost(self) -> float:
        """The number that the outermost code stands for."""
        return 127.0 if self.bits == 8 else _E2M1[-1]

    def encode(self, m: Tensor, v: Tensor | None, block_size: int) -> tuple[Tensor, Tensor]:
        """Codes and the largest quotient of each block.

        Args:
            m: float32, any shape; blocks are runs of its elements in row-major order.
            v: the second moment as it is kept, in m's shape; None for a unit of 1.
            block_size: elements a block.

        Returns:
            (codes, largest): uint8 in m's shape; float32 (blocks,).
        """
        blocks = to_blocks(m if v is None else m * _over_unit(v), block_size)
        codes = torch.empty_like(blocks, dtype=torch.uint8)
        largest = torch.zeros(blocks.shape[0], dtype=torch.float32, device=m.device)
        for chunk in chunks(blocks):
            codes[chunk], largest[chunk] = self._encode(blocks[chunk])
        return from_blocks(codes, m.shape, block_size), largest

    def decode(self, codes: Tensor, largest: Tensor, v: Tensor | None, block_size: int) -> Tensor:
        """The float32 tensor that codes stand for, in their shape."""
        blocks = to_blocks(codes, block_size)
        values = torch.empty_like(blocks, dtype=torch.float32)
        for chunk in chunks(blocks):
            values[chunk] = self._decode(blocks[chunk], largest[chunk, None])
        quotients = from_blocks(values, codes.shape, block_size)
        return quotients if v is None else quotients * unit_of(v)

    def _encode(self, q: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = q.abs().nan_to_num(nan=0.0, posinf=torch.inf)
        infinite = torch.isinf(magnitude)
        top = torch.where(infinite, 0.0, magnitude).amax(dim=1, keepdim=True)
        top = torch.where((top < _SMALLEST) & infinite.any(dim=1, keepdim=True), _LARGEST, top)
        magnitude = torch.where(infinite, top, magnitude)
        empty = top < _SMALLEST
        top = torch.where(empty, 0.0, top)
        # Tensor by tensor: torch multiplies by a rounded reciprocal where either is a number of the host.
        rate = torch.where(empty, 0.0, torch.full_like(top, self.outermost) / top)
        code = self._nearest(magnitude * rate)
        code = torch.where((magnitude == top) & ~empty, self.sign - 1, code)
        code = torch.where((q < 0) & (code > 0), code + self.sign, code)
        return code.to(torch.uint8), top.squeeze(1)

    def _decode(self, codes: Tensor, largest: Tensor) -> Tensor:
        code = codes.to(torch.int32)
        index = code & (self.sign - 1)
        number = index.to(torch.float32) if self.bits == 8 else _levels(codes.device)[index]
        value = number * (largest / torch.full_like(largest, self.outermost))
        value = torch.where(index == self.sign - 1, largest, value)
        return torch.where(code >= self.sign, -value, value)

    def _nearest(self, scaled: Tensor) -> Tensor:
        if self.bits == 8:
            return scaled.round().clamp_max(127.0).to(torch.int32)
        levels = _levels(scaled.device)
        return torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True)


@functools.lru_cache(maxsize=16)  # made once: copying it to a GPU waits for the device, and cannot be captured
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1, dtype=torch.float32, device=device)
