"""Float maps: the numbers of a small float format, divided by its largest.

What a block-wise scaled float8 state means, as a codebook, so that it is measured and looked at like the others.
The sign bit is a code bit only with a sign; minus zero is no value of its own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from narrowgauge.formats._codebooks._map import CodebookMap
from narrowgauge.formats._float import FP4_E2M1, FP6_E2M3, FP6_E3M2, FP8_E4M3, FP8_E5M2, FloatFormat


def _float_map(fmt: FloatFormat, signed: bool, bits: int) -> Tensor:
    """The finite numbers of the format over its largest, in float32."""
    positive = fmt.decode(torch.arange(fmt.max_code + 1, device="cpu")) / fmt.max
    return torch.cat([-positive.flip(0)[:-1], positive]) if signed else positive


MAPS = tuple(
    CodebookMap(
        fmt.name,
        f"the numbers of {fmt.name} over its largest, {fmt.max:g}",
        "OCP 8-bit Floating Point; OCP Microscaling Formats",
        functools.partial(_float_map, fmt),
        signed_bits=(fmt.bits,),
        unsigned_bits=(fmt.bits,),
    )
    for fmt in (FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, FP4_E2M1)
)
