"""Tensors in eight bits with one scale a row, a column, a block of 128, or in all.

A matrix multiply in eight bits can undo its scales after the sum only if they are constant along it: a scale a
row of the left operand, a column of the right one, or one for the whole tensor. Or it sums 128 products at a time
and undoes the scales of each such sum; then they need only be constant along these 128. So there are six scalings:

    "row", "column", "tensor"    a row, a column, or the whole matrix shares a scale
    "row128", "column128"        128 consecutive elements of a row (1 x 128) or of a column (128 x 1)
    "tile128"                    a tile of 128 x 128

Blocks and tiles begin at multiples of 128; the last ones may be shorter. Each scaling divides by the largest
magnitude that a scale covers, its *absmax*, so that this element takes the largest code Q: 127 in int8, 448 in
e4m3, 57344 in e5m2.

    codes = round(Q / absmax · x)          scale = absmax / Q          x ≈ scale · codes

Every kernel follows this specification, bit for bit:

- Everything is computed in float32, from x rounded to float32: the two divisions and the product above are each
  rounded once. Int8 is rounded to nearest, ties to even, into [-127, 127]; -128 is not used. Float8 is rounded
  to nearest, ties to even, subnormals included.
- An absmax below 2^-110 counts as zero: codes and scale are 0. Above it neither Q / absmax nor absmax / Q
  leaves the normal numbers of float32, on devices that flush subnormals too.
- Elements beyond a given absmax (one that is not x's own) saturate.
- **Inf and NaN become NaN.** Int8 has no code for them, so the scale of the row, column or tensor is NaN: with a
  scale a row (or block of it) of the input the same rows of the output are NaN as with nn.Linear, with one for the
  tensor all of them. In float8 the element itself becomes NaN, and absmax is that of the finite elements: no scale
  changes.

Source: Wortsman et al. 2023, Equation 1 and "float8" of Section 2.2.1 (whose simulation divides by the absmax
and casts to float8 values between -1 and 1; here the whole range of the format is used, as hardware wants it).
Blocks: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, Section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from narrowgauge._arguments import check_choice
from narrowgauge.formats import FP8_E4M3, FP8_E5M2, FloatFormat, round_to

Scaling = Literal["row", "column", "tensor", "row128", "column128", "tile128"]
Format = Literal["int8", "e4m3", "e5m2"]

BLOCK = 128
# How many rows and columns share a scale; 0 is all of them.
_SHARED: dict[Scaling, tuple[int, int]] = {
    "row": (1, 0), "column": (0, 1), "tensor": (0, 0),
    "row128": (1, BLOCK), "column128": (BLOCK, 1), "tile128": (BLOCK, BLOCK),
}  # fmt: skip
SCALINGS: tuple[Scaling, ...] = tuple(_SHARED)
BLOCK_SCALINGS: tuple[Scaling, ...] = ("row128", "column128", "tile128")
SMALLEST_ABSMAX = 2.0**-110


class CodeFormat(NamedTuple):
    """A format of eight bits: torch's dtype, the largest code, and the float format if it is one."""

    dtype: torch.dtype
    largest: float
    floats: FloatFormat | None = None


FORMATS: dict[str, CodeFormat] = {
    "int8": CodeFormat(torch.int8, 127.0),
    "e4m3": CodeFormat(torch.float8_e4m3fn, FP8_E4M3.max, FP8_E4M3),
    "e5m2": CodeFormat(torch.float8_e5m2, FP8_E5M2.max, FP8_E5M2),
}


class ScaledCodes(NamedTuple):
    """A matrix in eight bits.

    Attributes:
        codes: (rows, columns) of int8, float8_e4m3fn or float8_e5m2.
        scale: float32, the value of the code 1: (rows, 1), (1, columns) or (1, 1); in blocks
            (rows, ⌈columns / 128⌉), (⌈rows / 128⌉, columns) or (⌈rows / 128⌉, ⌈columns / 128⌉).
    """

    codes: Tensor
    scale: Tensor

    def t(self) -> ScaledCodes:
        """The transposed matrix, without a copy."""
        return ScaledCodes(self.codes.t(), self.scale.t())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float32 product of codes and scale, rounded to a dtype."""
        return (self.codes.to(torch.float32) * spread(self.scale, self.codes.shape)).to(dtype)


def quantize(x: Tensor, scaling: Scaling, format: Format = "int8", absmax: Tensor | None = None) -> ScaledCodes:
    """A matrix in eight bits.

    Args:
        x: float matrix (rows, columns).
        scaling: ``"row"``, ``"column"``, ``"tensor"``, ``"row128"``, ``"column128"`` or ``"tile128"``: what shares
            a scale.
        format: ``"int8"``, ``"e4m3"`` or ``"e5m2"``.
        absmax: the largest magnitude to use instead of x's own, such as an average of past ones: float32, of the
            scale's shape. Elements beyond it saturate.

    Returns:
        Codes and scales. Zeros stay zeros, and x times a power of two has the same codes and that multiple of
        the scale (as long as no absmax falls below 2^-110 and nothing leaves float32).

    Raises:
        ValueError: for an x that is no float matrix, or an unknown scaling or format.

    Source: Wortsman et al. 2023, Equation 1.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x must be a matrix of floats, got {x.dtype} of shape {tuple(x.shape)}")
    check_choice("scaling", scaling, SCALINGS)
    check_choice("format", format, tuple(FORMATS))
    own = largest_magnitude(x, scaling, format)
    if absmax is not None and (absmax.shape != own.shape or not absmax.is_floating_point()):
        got = f"{absmax.dtype} of shape {tuple(absmax.shape)}"
        raise ValueError(f"absmax must be floats of shape {tuple(own.shape)}, got {got}")
    return quantize_by(x, own, own if absmax is None else absmax, format)


def quantize_by(x: Tensor, own: Tensor, absmax: Tensor, format: Format) -> ScaledCodes:
    """A matrix in eight bits by an absmax; `own` is its `largest_magnitude`, of the same shape."""
    # Two comparisons that NaN fails: in int8 the own absmax shows inf and NaN, whichever absmax is used.
    usable = (absmax >= SMALLEST_ABSMAX) & (own < torch.inf)
    target = FORMATS[format]
    # A tensor, because torch divides a number by a tensor, and on a GPU a tensor by a number, in two roundings.
    largest = torch.full_like(absmax, target.largest)
    inverse = torch.where(usable, largest / absmax, 0.0)
    scale = torch.where(usable, absmax / largest, 0.0)
    x, inverse = x.to(torch.float32), spread(inverse, x.shape)
    if target.floats is None:
        scale = torch.where(own < torch.inf, scale, torch.nan)
        rounded = (x * inverse).nan_to_num(nan=0.0).round()
        return ScaledCodes(rounded.clamp(-target.largest, target.largest).to(torch.int8), scale)
    scaled = torch.where(x.isfinite(), (x * inverse).clamp(-target.largest, target.largest), torch.nan)
    return ScaledCodes(round_to(scaled, target.floats), scale)


def largest_magnitude(x: Tensor, scaling: Scaling, format: Format) -> Tensor:
    """The absmax of what shares a scale, float32, of the scale's shape.

    In int8 it is inf or NaN if there are such elements, in float8 that of the finite ones; 0 for no elements.
    """
    magnitude = x.to(torch.float32).abs()
    if format != "int8":
        magnitude = torch.where(magnitude < torch.inf, magnitude, 0.0)
    if x.numel() == 0:
        return magnitude.new_zeros(scale_shape(scaling, *x.shape))
    high, wide = (shared or size for shared, size in zip(_SHARED[scaling], x.shape, strict=True))
    more_rows, more_columns = (-size % shared for size, shared in zip(x.shape, (high, wide), strict=True))
    if more_rows or more_columns:
        magnitude = torch.nn.functional.pad(magnitude, (0, more_columns, 0, more_rows))
    rows, columns = magnitude.shape
    return magnitude.reshape(rows // high, high, columns // wide, wide).amax((1, 3))


def scale_shape(scaling: Scaling, rows: int, columns: int) -> tuple[int, int]:
    """The shape of a matrix's scales."""
    high, wide = (
        -(-size // shared) if shared else 1 for size, shared in zip((rows, columns), _SHARED[scaling], strict=True)
    )
    return high, wide


def spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales that a matrix of a shape can be multiplied by: those of blocks are repeated along them."""
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scale
