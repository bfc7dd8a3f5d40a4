"""An fp32 weight cut into a bf16 word and an integer low word.

A float32 read as a 32-bit integer is sign, exponent, fraction, in that order, so its upper half *is* a bf16 and
integer arithmetic on the pattern moves the magnitude by units in the last place. Rounding the pattern to its
upper 16 bits (halves away from zero) gives the bf16 word hi; what is left over, between -2^15 and 2^15 - 1, is
the low word lo = bits - (hi << 16). Both together are the exact float32, in the same 4 bytes as the float32
alone, while the model computes with hi. Rounding the pattern to its upper 24 bits first leaves 8 bits for lo: a
24-bit weight in 3 bytes.

A hi that was changed from outside keeps its stale lo. That may move the weight by half a unit in the last place
of the new hi, but never across zero and never into NaN. (An infinite hi with a negative lo is how a float32 in
the last half unit below bf16's overflow is kept.)
"""

from __future__ import annotations

import torch
from torch import Tensor, bitwise_left_shift, bitwise_right_shift

# Shifts are written as functions: on a DTensor torch's operators << and >> return it unshifted (2.13).
_INFINITY = 0x7F80  # bf16's exponent field, all ones


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The float32 weight of a bf16 word and an int16 (32 bits) or int8 (24 bits) low word."""
    pattern = hi.view(torch.int16).to(torch.int32)
    magnitude = pattern & 0x7FFF
    offset = bitwise_left_shift(lo.to(torch.int32), 0 if lo.dtype == torch.int16 else 8)
    # A stale low word must not borrow below zero, nor carry infinity into NaN; NaN stays as it is.
    offset = torch.where(magnitude == 0, offset.clamp_min(0), offset)
    offset = torch.where(
        magnitude >= _INFINITY, torch.where(magnitude == _INFINITY, offset.clamp_max(0), 0), offset
    )
    return (bitwise_left_shift(pattern, 16) + offset).view(torch.float32)


def cut(weight: Tensor, low_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bf16 word and the low word of a float32 weight.

    Args:
        weight: float32 tensor.
        low_dtype: torch.int16 (hi and lo together are the weight, exactly) or torch.int8 (they are the weight
            rounded to 16 significant bits, halves away from zero).

    Returns:
        (hi, lo) of the weight's shape. Infinities and NaN are in hi, with lo = 0.
    """
    bits = weight.contiguous().view(torch.int32)
    sign, magnitude = bits & -0x80000000, bits & 0x7FFFFFFF
    if low_dtype == torch.int8:
        magnitude = (magnitude + 0x80) & ~0xFF
    rounded = bitwise_right_shift(magnitude + 0x8000, 16)
    lo = magnitude - bitwise_left_shift(rounded, 16)
    hi = (bitwise_right_shift(sign, 16) | rounded).to(torch.int16).view(torch.bfloat16)
    finite = torch.isfinite(weight)
    low = lo if low_dtype == torch.int16 else bitwise_right_shift(lo, 8)
    return torch.where(finite, hi, weight.to(torch.bfloat16)), torch.where(finite, low, 0).to(low_dtype)
