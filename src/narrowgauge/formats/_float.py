"""Float formats as frozen values.

A binary float format is two numbers, how many bits hold the exponent and how many the fraction, and one
convention, what the top exponent means. Everything else follows and is computed here, never typed in: the
bias, the largest finite value, the smallest normal and subnormal, the spacing around any value.

A number x with 2^e <= |x| < 2^(e+1) sits on a grid of step `ulp(x) = 2^(max(e, e_min) - mantissa_bits)`, one
*unit in the last place*. Adding less than half an ulp to x and rounding to nearest gives x again: the whole
trouble with training in bf16, where half an ulp of 1.0 is 2^-8 = 0.0039, is in that sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Args:
        name: the field's name for it, such as ``"bf16"``.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the fraction field, the hidden bit not counted (bf16: 7).
        has_infinity: True for IEEE formats, whose top exponent is infinity and NaN; False where, as in OCP's
            e4m3, only the all-ones pattern is NaN and the rest of the top binade is finite.
        dtype: torch's dtype of the format, if it has one.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    dtype: torch.dtype | None = field(default=None, compare=False)

    @property
    def bits(self) -> int:
        """Width of the whole code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number, e_min."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite number, e_max."""
        return self.bias + (0 if self.has_infinity else 1)

    @property
    def max(self) -> float:
        """The largest finite value."""
        # Without infinities the all-ones fraction of the top binade is NaN, so the largest number is one below.
        fraction = 2.0 - 2.0**-self.mantissa_bits * (1 if self.has_infinity else 2)
        return fraction * 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        """The smallest positive number with a full fraction."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number, and the spacing of all subnormals."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def ulp(self, x: Tensor) -> Tensor:
        """The spacing of the format at each element, 2^(max(e, e_min) - mantissa_bits).

        Args:
            x: float tensor of any shape; float32 is worked on as it is (no spacing of the formats here is below
                its smallest number but float32's own), any other dtype in float64.

        Returns:
            Float32 or float64 tensor of x's shape, exact; ulp(0) is the smallest subnormal, that of inf or NaN
            is NaN.

        Source: Collage, Definition 3.1.
        """
        # The pattern with all but the exponent masked away is the power of two below |x|, exactly.
        if x.dtype == torch.float32:
            power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        else:
            x = x.to(torch.float64)
            power = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
        ulp = power.clamp_min(self.min_normal) * 2.0**-self.mantissa_bits
        return torch.where(torch.isfinite(x), ulp, torch.nan)

    @classmethod
    def of(cls, dtype: torch.dtype) -> FloatFormat:
        """The format that a torch dtype stores.

        Raises:
            ValueError: for a dtype that is none of the formats here.
        """
        for known in (FP32, FP16, BF16, FP8_E4M3, FP8_E5M2):
            if known.dtype == dtype:
                return known
        raise ValueError(f"dtype: got {dtype}, takes float32, float16, bfloat16, float8_e4m3fn or float8_e5m2")


FP32 = FloatFormat("fp32", 8, 23, dtype=torch.float32)
FP16 = FloatFormat("fp16", 5, 10, dtype=torch.float16)
BF16 = FloatFormat("bf16", 8, 7, dtype=torch.bfloat16)
FP8_E4M3 = FloatFormat("fp8_e4m3", 4, 3, has_infinity=False, dtype=torch.float8_e4m3fn)
FP8_E5M2 = FloatFormat("fp8_e5m2", 5, 2, dtype=torch.float8_e5m2)
