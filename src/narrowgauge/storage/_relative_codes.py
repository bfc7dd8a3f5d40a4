"""Codes of a first moment in units of the root of its second moment.

An element of m is never much larger than the root of the same element of v, and the update is their quotient.
In that unit all elements of a block have about one scale, whatever their gradients' scales are: a few evenly
spaced codes serve them, with one number a block. And whatever is lost is lost in proportion to the element's
own step: what a storage hands over to the weight is then never more than a fixed share of a step.

The unit is the largest power of two that is not above the root. Its exponent is half of v's, a shift of
integers, and dividing by it is exact, so that codes are the same on every device.

What is fixed here is fixed for every kernel, bit for bit:

- The unit of an element of v with biased exponent E is 2^(floor((E + 127) / 2) - 127); of a zero, 2^-64; of a NaN,
  whatever its sign, 2^64.
- q is the element over its unit, and zero for what is not finite. A block keeps its scale, the largest |q| over
  127 (8 bits) or over 6 (4 bits), rounded to float32; a scale below 2^-126 is zero, and so is the block.
- q is divided by the scale as a multiplication with 1 / scale, quotient and product rounded to float32. 8 bits:
  the code is the nearest integer, ties to even, in two's complement. 4 bits: the nearest of the magnitudes 0,
  1/2, 1, 3/2, 2, 3, 4, 6, ties to the smaller, and the highest bit is the sign.
- A code is its number times the scale, rounded to float32, times the unit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import chunks, from_blocks, to_blocks

_SMALLEST = 2.0**-126
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8  # of a 4-bit code


def unit_of(v: Tensor) -> Tensor:
    """The unit for each element of a second moment: float32 powers of two in its shape."""
    return (((_exponent(v) + 127) >> 1) << 23).view(torch.float32)


def _over_unit(v: Tensor) -> Tensor:
    """1 over the unit, exactly."""
    return ((254 - ((_exponent(v) + 127) >> 1)) << 23).view(torch.float32)


def _exponent(v: Tensor) -> Tensor:
    # Only a NaN can have a sign. With it the unit would be the smallest, not the largest, and the quotient so large
    # that nothing is left of the block.
    return (v.contiguous().view(torch.int32) & 0x7FFFFFFF) >> 23


@dataclass(frozen=True)
class RelativeCodes:
    """Codes of 8 or of 4 bits.

    Attributes:
        bits: of a code.
    """

    bits: int

    @property
    def outermost(self) -> float:
        """The number that the largest quotient of a block comes to."""
        return 127.0 if self.bits == 8 else _E2M1[-1]

    def encode(self, m: Tensor, v: Tensor | None, block_size: int) -> tuple[Tensor, Tensor]:
        """Codes and scales.

        Args:
            m: float32, any shape; blocks are runs of its elements in row-major order.
            v: the second moment as it is kept, in m's shape; None for a unit of 1.
            block_size: elements a block.

        Returns:
            (codes, scales): uint8 in m's shape; float32 (blocks,).
        """
        blocks = to_blocks(m if v is None else m * _over_unit(v), block_size)
        codes = torch.empty_like(blocks, dtype=torch.uint8)
        scales = torch.zeros(blocks.shape[0], dtype=torch.float32, device=m.device)
        for chunk in chunks(blocks):
            codes[chunk], scales[chunk] = self._encode(blocks[chunk])
        return from_blocks(codes, m.shape, block_size), scales

    def decode(self, codes: Tensor, scales: Tensor, v: Tensor | None, block_size: int) -> Tensor:
        """The float32 tensor that codes stand for, in their shape."""
        blocks = to_blocks(codes, block_size)
        values = torch.empty_like(blocks, dtype=torch.float32)
        for chunk in chunks(blocks):
            values[chunk] = self._numbers(blocks[chunk]) * scales[chunk, None]
        quotients = from_blocks(values, codes.shape, block_size)
        return quotients if v is None else quotients * unit_of(v)

    def _encode(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.where(torch.isfinite(q), q, 0.0)
        top = q.abs().amax(dim=1, keepdim=True)
        # Tensor by tensor: torch multiplies by a rounded reciprocal where either is a number of the host.
        scale = top / torch.full_like(top, self.outermost)
        scale = torch.where(scale >= _SMALLEST, scale, 0.0)
        scaled = q * torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
        if self.bits == 8:
            return scaled.round().to(torch.int8).view(torch.uint8), scale.squeeze(1)
        levels = _levels(q.device)
        code = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
        return torch.where((scaled < 0) & (code > 0), code + _SIGN, code).to(torch.uint8), scale.squeeze(1)

    def _numbers(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.int8).to(torch.float32)
        number = _levels(codes.device)[(codes & (_SIGN - 1)).to(torch.int32)]
        return torch.where(codes >= _SIGN, -number, number)


@functools.lru_cache(maxsize=16)  # made once: copying it to a GPU waits for the device, and cannot be captured
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1, dtype=torch.float32, device=device)
