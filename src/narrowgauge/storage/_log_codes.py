"""Logarithmic codes with a sign, linear near zero: for a moment that is alone.

127 magnitudes and a sign. The steps are those of |x| + c, from c, which is zero, to the largest |x| + c of the
block: equal in size up to c, roughly in ratio above. The logarithm is the float's bit pattern read as an
integer, as in `_pattern_codes`. c is a power of two, 8 times the least magnitude above zero or the next below,
though no less than 2^-24 of the largest: the least elements get equal steps, the others logarithmic ones.

What is fixed here is fixed for every kernel, bit for bit:

- Magnitudes below 2^-126 and NaN count as zero. Infinities take the code of the largest finite element; where
  there is none, of float32's largest number.
- With lo and hi the patterns of c and of the largest |x| + c, an element for which |x| + c has the pattern b
  has the magnitude k = floor((floor((b - lo) * r) + 2^15) / 2^16), where r = 2^16 * 127 / (hi - lo) and b - lo
  are rounded to float32, and so is their product. The largest element has k = 127. The code is k, and 128 + k
  if x is negative and k is not 0.
- k is the float with pattern lo + round(k * ((hi - lo) / 127)), all rounded to float32, ties to even, minus c;
  127 is the largest element itself. A block keeps c and the largest magnitude.

The error is never larger than the element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import chunks, from_blocks, to_blocks

_SMALLEST = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_EXPONENT = 0x7F800000
_OFFSET = 8.0
_BINADES = 24
_SIGN = 128
_STEPS = 127


def encode_logarithms(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Codes and ranges of a float32 tensor.

    Args:
        x: any shape; blocks are runs of its elements in row-major order.
        block_size: elements a block.

    Returns:
        (codes, ranges): uint8 in x's shape; float32 (blocks, 2), c and the largest magnitude of each block.
    """
    blocks = to_blocks(x, block_size)
    codes = torch.empty_like(blocks, dtype=torch.uint8)
    ranges = torch.zeros(blocks.shape[0], 2, dtype=torch.float32, device=x.device)
    for chunk in chunks(blocks):
        codes[chunk], ranges[chunk] = _encode(blocks[chunk])
    return from_blocks(codes, x.shape, block_size), ranges


def decode_logarithms(codes: Tensor, ranges: Tensor, block_size: int) -> Tensor:
    """The float32 tensor that codes stand for, in their shape."""
    blocks = to_blocks(codes, block_size)
    values = torch.empty_like(blocks, dtype=torch.float32)
    for chunk in chunks(blocks):
        values[chunk] = _decode(blocks[chunk], ranges[chunk])
    return from_blocks(values, codes.shape, block_size)


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    magnitude = x.abs()
    magnitude = torch.where(magnitude >= _SMALLEST, magnitude, 0.0)  # NaN compares false: zero
    infinite = torch.isinf(magnitude)
    finite = torch.where(infinite, 0.0, magnitude)
    top = finite.amax(dim=1, keepdim=True)
    top = torch.where((top == 0) & infinite.any(dim=1, keepdim=True), _LARGEST, top)
    magnitude = torch.where(infinite, top, magnitude)
    least = torch.where(finite > 0, finite, _LARGEST).amin(dim=1, keepdim=True)
    ranges = torch.cat([_foot(least, top), top], dim=1)
    lo, hi, foot = _ends(ranges)
    span = (hi - lo).to(torch.float32)
    # Tensor by tensor: torch multiplies by a rounded reciprocal where either is a number of the host.
    rate = torch.where(span > 0, torch.full_like(span, _STEPS << 16) / span, 0.0)
    fine = ((_pattern(magnitude + foot) - lo).clamp_min(0).to(torch.float32) * rate).to(torch.int32)
    code = torch.where(magnitude == top, _STEPS, ((fine + (1 << 15)) >> 16).clamp_max(_STEPS))
    code = torch.where((x < 0) & (code > 0), code + _SIGN, code)
    return torch.where(magnitude > 0, code, 0).to(torch.uint8), ranges


def _decode(codes: Tensor, ranges: Tensor) -> Tensor:
    lo, hi, foot = _ends(ranges)
    span = (hi - lo).to(torch.float32)
    step = span / torch.full_like(span, _STEPS)
    code = codes.to(torch.int32)
    index = code & (_SIGN - 1)
    value = (lo + (index.to(torch.float32) * step).round().to(torch.int32)).view(torch.float32) - foot
    value = torch.where(index == _STEPS, ranges[:, 1:], value)
    return torch.where(code >= _SIGN, -value, value)


def _foot(least: Tensor, top: Tensor) -> Tensor:
    """c of each block; 0 where all is zero."""
    foot = torch.maximum(least * _OFFSET, top * 2.0**-_BINADES)
    foot = torch.minimum(foot, top * 2).clamp(_SMALLEST, _LARGEST)
    return torch.where(top > 0, (_pattern(foot) & _EXPONENT).view(torch.float32), 0.0)


def _ends(ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The patterns between which the steps lie, and c; (blocks, 1) each."""
    foot, top = ranges[:, :1], ranges[:, 1:]
    return _pattern(foot), _pattern(top + foot), foot


def _pattern(x: Tensor) -> Tensor:
    """A float32 tensor as the integers that its bits are."""
    return x.contiguous().view(torch.int32)
