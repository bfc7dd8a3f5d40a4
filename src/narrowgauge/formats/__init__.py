"""What a number can be: float formats, codebooks, and the ways to round into them."""

from narrowgauge.formats._codebooks import Coder, codebook, coder
from narrowgauge.formats._float import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FloatFormat
from narrowgauge.formats._philox import random_bits
from narrowgauge.formats._rounding import round_to, round_with_bits

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "Coder",
    "FloatFormat",
    "codebook",
    "coder",
    "random_bits",
    "round_to",
    "round_with_bits",
]
