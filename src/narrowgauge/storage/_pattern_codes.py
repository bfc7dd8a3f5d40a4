"""Codes of a second moment: equal steps of a float's bit pattern, from a block's least element to its largest.

A moment may span many orders of magnitude inside one block, or hardly a factor of two. A fixed map spends its
codes on orders of magnitude whether they are there or not; these codes are spread over the ones that are. The
logarithm they are spread on needs no logarithm: read as an integer, a positive float *is* 2^23 (log2(x) + 127),
but for a straight line in place of the curve inside each binade. Integers are the same on every device, and so
are the codes.

In 8 bits a step is a power of two: a code is the pattern without its lowest bits, counted from the block's
least. So it is a float with as many mantissa bits as the block's range leaves room for (7 in one binade, 2 in
forty), and a number that was kept once is kept again unchanged. To decode is to multiply and add two integers,
to encode is to add and to shift. In 4 bits half of fifteen codes is too many to lose, and a range that is wider
than it must be widens with every step: steps are whole patterns from the least element itself.

What is fixed here is fixed for every kernel, bit for bit:

- Code 0 is zero. Code k from 1 on is the float with pattern base + (k - 1) * step. In 8 bits step is 2^s and base
  a multiple of it; a block keeps base + s, in one 32-bit word. In 4 bits it keeps base and step. A block of zeros
  has zeros.
- Magnitudes below 2^-126 and negative numbers count as zero; infinities and NaN as the block's largest finite
  element, and as float32's largest number where there is none. No other element becomes zero, because what
  rounds to zero divides: where the block spans more than 63 binades (48 in 4 bits), what is less than that
  below the largest counts as that.
- With lo and hi the least and the largest pattern above zero: in 8 bits s from 12 on is the smallest for which
  ceil(hi / 2^s) - floor(lo / 2^s) <= 254, base = floor(lo / 2^s) 2^s. In 4 bits base = lo, step is
  ceil((hi - lo) / 14), and 1 at least.
- Pattern b has the code floor((b - base + d) / step) + 1. d is half a step to round to nearest, or floor(r step
  / 2^16) with 16 random bits r to round stochastically. What would be more than float32's largest number has
  the code below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import chunks, from_blocks, to_blocks

_SMALLEST = 1 << 23  # the pattern of the smallest normal number
_INFINITY = 0x7F800000
_SHIFT = 0xFFF  # the bits of a word that hold s


@dataclass(frozen=True)
class PatternCodes:
    """Codes of 8 or of 4 bits.

    Attributes:
        bits: of a code; 8 or 4.
    """

    bits: int

    @property
    def binades(self) -> int:
        """How far below a block's largest element its smallest may lie before it counts as larger."""
        return 63 if self.bits == 8 else 48

    @property
    def steps(self) -> int:
        """How many steps lie between the lowest code above zero and the highest."""
        return (1 << self.bits) - 2

    def encode(self, x: Tensor, block_size: int, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and ranges of a float32 tensor.

        Args:
            x: any shape; blocks are runs of its elements in row-major order.
            block_size: elements a block.
            random: integers in [0, 2^16) in x's shape, for stochastic rounding; to nearest without.

        Returns:
            (codes, ranges): uint8 in x's shape; int32, (blocks,) in 8 bits and (blocks, 2) in 4, where the codes of
            each block begin and how wide a step is.
        """
        blocks = to_blocks(x, block_size)
        bits = None if random is None else to_blocks(random, block_size)
        codes = torch.empty_like(blocks, dtype=torch.uint8)
        shape = (blocks.shape[0],) if self.bits == 8 else (blocks.shape[0], 2)
        ranges = torch.zeros(shape, dtype=torch.int32, device=x.device)
        for chunk in chunks(blocks):
            codes[chunk], ranges[chunk] = self._encode(blocks[chunk], None if bits is None else bits[chunk])
        return from_blocks(codes, x.shape, block_size), ranges

    def decode(self, codes: Tensor, ranges: Tensor, block_size: int) -> Tensor:
        """The float32 tensor that codes stand for, in their shape."""
        blocks = to_blocks(codes, block_size)
        values = torch.empty_like(blocks, dtype=torch.float32)
        for chunk in chunks(blocks):
            base, step = self.base_and_step(ranges[chunk])
            code = blocks[chunk].to(torch.int32)
            values[chunk] = torch.where(code > 0, base + (code - 1) * step, 0).view(torch.float32)
        return from_blocks(values, codes.shape, block_size)

    def sound(self, ranges: Tensor) -> Tensor:
        """Which ranges `encode` could have made."""
        words = ranges[:, None] if self.bits == 8 else ranges
        base, step = self.base_and_step(ranges)
        narrowest, widest = (1 << 12, 1 << 23) if self.bits == 8 else (1, 1 << 28)
        sound = (base >= _SMALLEST) & (base < _INFINITY) & (step >= narrowest) & (step <= widest)
        return sound.squeeze(1) | (words == 0).all(dim=1)

    def base_and_step(self, ranges: Tensor) -> tuple[Tensor, Tensor]:
        """The pattern of the lowest code above zero, and that from one code to the next: int32 (blocks, 1)."""
        if self.bits == 4:
            return ranges[:, :1], ranges[:, 1:]
        return (ranges & ~_SHIFT)[:, None], (1 << (ranges & _SHIFT).clamp_max(30))[:, None]

    def _encode(self, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
        pattern = x.contiguous().view(torch.int32)
        wild = (pattern & 0x7FFFFFFF) >= _INFINITY
        there = (pattern >= _SMALLEST) & ~wild
        hi = torch.where(there, pattern, 0).amax(dim=1, keepdim=True)
        wild &= ~torch.isneginf(x)
        hi = torch.where((hi == 0) & wild.any(dim=1, keepdim=True), _INFINITY - 1, hi)
        lo = torch.where(there, pattern, _INFINITY - 1).amin(dim=1, keepdim=True)
        lo = torch.maximum(torch.minimum(lo, hi), (hi - (self.binades << 23)).clamp_min(_SMALLEST))
        ranges = torch.where(hi > 0, self._range(lo, hi), 0).squeeze(1)
        base, step = self.base_and_step(ranges)
        pattern = torch.where(wild, hi, torch.where(there, torch.maximum(pattern, lo), 0))
        d = step >> 1 if random is None else ((random.to(torch.int64) * step) >> 16).to(torch.int32)
        code = torch.div(pattern - base + d, step.clamp_min(1), rounding_mode="floor")
        highest = torch.div(_INFINITY - 1 - base, step.clamp_min(1), rounding_mode="floor")
        code = torch.where(pattern > 0, torch.minimum(code, highest) + 1, 0)
        return code.to(torch.uint8), ranges

    def _range(self, lo: Tensor, hi: Tensor) -> Tensor:
        """What blocks between two patterns keep; (blocks, 1), or (blocks, 2) in 4 bits."""
        if self.bits == 4:
            return torch.cat([lo, ((hi - lo + self.steps - 1) // self.steps).clamp_min(1)], dim=1)
        s = _bit_length((hi - lo) >> 8).clamp_min(12)
        s = s + (((hi + (1 << s) - 1) >> s) - (lo >> s) > self.steps).to(torch.int32)
        return ((lo >> s) << s) + s


def _bit_length(x: Tensor) -> Tensor:
    """How many bits an integer from 0 to 2^24 takes; read off the exponent of the float that it is exactly."""
    return ((x.to(torch.float32).view(torch.int32) >> 23) - 126).clamp_min(0)
