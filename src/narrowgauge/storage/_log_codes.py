"""Logarithmic codes: equal steps of a float's bit pattern, laid between the least and the largest of a block.

A moment may span many orders of magnitude inside one block, or hardly a factor of two. A fixed map spends its codes
on orders of magnitude whether they are there or not; these codes are spread over the ones that are. The logarithm
they are spread on needs no logarithm: read as an integer, a positive float *is* 2^23 (log2(x) + 127), but for a
straight line in place of the curve inside each binade. Integers are the same on every device, and so are the codes.

**Without sign** (second moments) code 0 is zero, and codes 1 to n run in equal steps of the pattern from the
block's least element above zero to its largest, both exact. No element but zero becomes zero, because what rounds
to zero divides: where the block spans more than 48 binades, the smallest are taken for the lower end.

**With sign** (first moments) the steps are those of |x| + c, from c, which is zero, to the largest |x| + c: equal
in size up to c, roughly in ratio above. c is a power of two, 8 times the least magnitude above zero or the next
below, though no less than 2^-24 of the largest: the least elements get equal steps, the others logarithmic ones.

What is fixed here is fixed for every kernel, bit for bit:

- Magnitudes below 2^-126, NaN, and negative elements where there is no sign count as zero. Infinities take the
  code of the largest finite element; where there is none, float32's largest number.
- With lo and hi the patterns of the lower end and of the largest (of c and |x| + c where there is a sign), and n
  steps between them, an element with pattern b has the code floor((floor((b - lo) * r) + d) / 2^16), where
  r = 2^16 n / (hi - lo) and b - lo are rounded to float32, and so is their product. d is 2^15 to round to nearest,
  or 16 random bits to round stochastically. The largest element has code n whatever d is.
- Code k is the float with pattern lo + round(k * ((hi - lo) / n)), all rounded to float32, ties to even; minus c
  where there is a sign. Code n is the largest element itself.

To nearest, an element comes back within half a step of the pattern: a relative error of at most
(hi - lo) / n / 2^24 where there is no sign. Where there is one, the error is never larger than the element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import chunks, from_blocks, to_blocks

_SMALLEST = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_BINADE = 1 << 23
_EXPONENT = 0x7F800000
_OFFSET = 8.0
_HALF = 1 << 15


@dataclass(frozen=True)
class LogCodes:
    """How many codes, and how far down they may reach.

    Attributes:
        signed: whether the highest bit of a code is a sign.
        bits: of a code; at most 8.
        binades: how far below a block's largest element the lower end may lie at most.
    """

    signed: bool
    bits: int
    binades: int

    @property
    def sign(self) -> int:
        """The bit of a code that is its sign."""
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        """The code of a block's largest element."""
        return self.sign - 1 if self.signed else 2 * self.sign - 1

    @property
    def steps(self) -> int:
        """How many steps lie between the lower end and the largest element."""
        return self.largest if self.signed else self.largest - 1

    def encode(self, x: Tensor, block_size: int, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and ranges of a float32 tensor.

        Args:
            x: any shape; blocks are runs of its elements in row-major order.
            block_size: elements a block.
            random: integers in [0, 2^16) in x's shape, for stochastic rounding; to nearest without.

        Returns:
            (codes, ranges): uint8 in x's shape; float32 (blocks, 2), the lower end (c where there is a sign) and
            the largest magnitude of each block.
        """
        blocks = to_blocks(x, block_size)
        bits = None if random is None else to_blocks(random, block_size)
        codes = torch.empty_like(blocks, dtype=torch.uint8)
        ranges = torch.zeros(blocks.shape[0], 2, dtype=torch.float32, device=x.device)
        for chunk in chunks(blocks):
            codes[chunk], ranges[chunk] = self._encode(blocks[chunk], None if bits is None else bits[chunk])
        return from_blocks(codes, x.shape, block_size), ranges

    def decode(self, codes: Tensor, ranges: Tensor, block_size: int) -> Tensor:
        """The float32 tensor that codes stand for, in their shape."""
        blocks = to_blocks(codes, block_size)
        values = torch.empty_like(blocks, dtype=torch.float32)
        for chunk in chunks(blocks):
            values[chunk] = self._decode(blocks[chunk], ranges[chunk])
        return from_blocks(values, codes.shape, block_size)

    def _encode(self, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
        magnitude = x.abs() if self.signed else x.clamp_min(0.0)
        magnitude = torch.where(magnitude >= _SMALLEST, magnitude, 0.0)  # NaN compares false: zero
        infinite = torch.isinf(magnitude)
        finite = torch.where(infinite, 0.0, magnitude)
        top = finite.amax(dim=1, keepdim=True)
        top = torch.where((top == 0) & infinite.any(dim=1, keepdim=True), _LARGEST, top)
        magnitude = torch.where(infinite, top, magnitude)
        least = torch.where(finite > 0, finite, _LARGEST).amin(dim=1, keepdim=True)
        ranges = torch.cat([self._foot(least, top), top], dim=1)
        lo, hi, _ = self._ends(ranges)
        span = (hi - lo).to(torch.float32)
        # Tensor by tensor: torch multiplies by a rounded reciprocal where either is a number of the host.
        rate = torch.where(span > 0, torch.full_like(span, self.steps << 16) / span, 0.0)
        pattern = _pattern(magnitude + ranges[:, :1] if self.signed else magnitude)
        fine = ((pattern - lo).clamp_min(0).to(torch.float32) * rate).to(torch.int32)
        code = (fine + (_HALF if random is None else random.to(torch.int32))) >> 16
        code = torch.where(magnitude == top, self.steps, code.clamp_max(self.steps))
        if self.signed:
            code = torch.where((x < 0) & (code > 0), code + self.sign, code)
        else:
            code = code + 1
        return torch.where(magnitude > 0, code, 0).to(torch.uint8), ranges

    def _decode(self, codes: Tensor, ranges: Tensor) -> Tensor:
        lo, hi, foot = self._ends(ranges)
        span = (hi - lo).to(torch.float32)
        step = span / torch.full_like(span, self.steps)
        code = codes.to(torch.int32)
        index = code & (self.sign - 1) if self.signed else code - 1
        pattern = lo + (index.to(torch.float32) * step).round().to(torch.int32)
        value = pattern.view(torch.float32)
        if self.signed:
            value = value - foot
        value = torch.where(index == self.steps, ranges[:, 1:], value)
        if not self.signed:
            return torch.where(code > 0, value, 0.0)
        return torch.where(code >= self.sign, -value, value)

    def _foot(self, least: Tensor, top: Tensor) -> Tensor:
        """The lower end of a block's range; 0 where all is zero."""
        if not self.signed:
            lowest = (_pattern(top) - self.binades * _BINADE).clamp_min(_BINADE)
            return torch.where(top > 0, torch.maximum(least, lowest.view(torch.float32)), 0.0)
        foot = torch.maximum(least * _OFFSET, top * 2.0**-self.binades)
        foot = torch.minimum(foot, top * 2).clamp(_SMALLEST, _LARGEST)
        return torch.where(top > 0, (_pattern(foot) & _EXPONENT).view(torch.float32), 0.0)

    def _ends(self, ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The patterns between which the steps lie, and the lower end; (blocks, 1) each."""
        foot, top = ranges[:, :1], ranges[:, 1:]
        return _pattern(foot), _pattern(top + foot if self.signed else top), foot


def _pattern(x: Tensor) -> Tensor:
    """A float32 tensor as the integers that its bits are."""
    return x.contiguous().view(torch.int32)
