"""What a number can be: float formats, codebooks, and the ways to round into them."""

from narrowgauge.formats._codebook_maps import CodebookMap
from narrowgauge.formats._codebooks import codebook, codebook_map, codebook_names, register_codebook
from narrowgauge.formats._coder import Coder, coder
from narrowgauge.formats._float import (
    BF16,
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    Binade,
    CodeRow,
    CodeTable,
    FloatFormat,
    NotableRow,
)
from narrowgauge.formats._philox import random_bits, random_halves
from narrowgauge.formats._rounding import round_to, round_with_bits

__all__ = [
    "BF16",
    "FP4_E2M1",
    "FP6_E2M3",
    "FP6_E3M2",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "Binade",
    "CodeRow",
    "CodeTable",
    "CodebookMap",
    "Coder",
    "FloatFormat",
    "NotableRow",
    "codebook",
    "codebook_map",
    "codebook_names",
    "coder",
    "random_bits",
    "random_halves",
    "register_codebook",
    "round_to",
    "round_with_bits",
]
