"""Block-wise quantization: codes of a codebook, and one scale a block.

Each run of `block_size` neighbours is divided by its largest magnitude and rounded to the nearest value of the
codebook. An outlier costs precision in its own block and nowhere else, and blocks can be worked on in parallel.

What is fixed here is fixed for every kernel, bit for bit: the scale is the float32 absmax of the block's finite
elements; a block whose absmax lies below 2^-126 (float32's subnormals, which GPUs may flush) is kept as zeros
with scale 0; otherwise x is multiplied by the correctly rounded float32 reciprocal of the scale and the product,
rounded to float32, is encoded to nearest with ties towards zero. Decoding is value times scale in float32.
Infinities take the outermost code, NaN the code of zero, and neither touches its neighbours.

Source: 8-bit Optimizers via Block-wise Quantization, Section 2.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import Coder

_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor as codes and scales.

    Attributes:
        codes: uint8 tensor of the original's shape.
        scales: float32 tensor (number of blocks,).
        codebook: float32 tensor of the values that codes mean.
        block_size: elements a scale serves, along the flattened tensor; None if one scale serves all.
    """

    codes: Tensor
    scales: Tensor
    codebook: Tensor
    block_size: int | None

    def dequantize(self) -> Tensor:
        """The float32 tensor that the codes stand for, in the original's shape."""
        return decode_blocks(self.codes, self.scales, Coder.of(self.codebook), self.block_size)


def quantize(x: Tensor, codebook: Tensor, block_size: int | None = 256) -> Quantized:
    """Quantize a tensor block by block, to nearest.

    Args:
        x: float tensor of any shape, taken in row-major order; quantized from its float32 values.
        codebook: ascending float32 values in [-1, 1] with a 0, at most 256 (see `narrowgauge.formats.codebook`).
        block_size: elements a block; None for one block (tensor-wise). The last block may be shorter.

    Raises:
        ValueError: for a block size below 1 or a codebook that is none.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size: got {block_size}, takes an integer of at least 1, or None")
    coder = Coder.of(codebook.to(x.device))
    codes, scales = encode_blocks(x.to(torch.float32), coder, block_size)
    return Quantized(codes, scales, coder.values, block_size)


def block_count(numel: int, block_size: int | None) -> int:
    """How many scales a tensor of numel elements has."""
    return math.ceil(numel / block_size) if block_size is not None else min(numel, 1)


def encode_blocks(x: Tensor, coder: Coder, block_size: int | None) -> tuple[Tensor, Tensor]:
    """Codes in x's shape and scales (blocks,) of a float32 tensor."""
    blocks = _as_blocks(x, block_size)
    finite = torch.where(torch.isfinite(blocks), blocks.abs(), 0.0)
    scales = finite.amax(dim=1) if blocks.numel() else finite.new_zeros(0)
    # With nothing finite to scale by, an infinity must not read back as zero: a zero second moment divides.
    alone = (scales == 0) & torch.isinf(blocks).any(dim=1)
    scales = torch.where(alone, torch.finfo(torch.float32).max, scales)
    empty = scales < _SMALLEST_SCALE
    scales = torch.where(empty, 0.0, scales)
    reciprocal = torch.where(empty, 0.0, 1.0 / scales)
    # An infinity times zero would be NaN; its sign is what must survive.
    bounded = blocks.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    codes = coder.encode(bounded * reciprocal[:, None])
    return codes.reshape(-1)[: x.numel()].view(x.shape), scales


def decode_blocks(codes: Tensor, scales: Tensor, coder: Coder, block_size: int | None) -> Tensor:
    """The float32 tensor, in the codes' shape."""
    values = _as_blocks(coder.decode(codes), block_size) * scales[:, None]
    return values.reshape(-1)[: codes.numel()].view(codes.shape)


def _as_blocks(x: Tensor, block_size: int | None) -> Tensor:
    """(blocks, block_size), the last padded with zeros."""
    flat = x.reshape(-1)
    # A block longer than the tensor is the tensor: there is nothing to pad.
    size = max(1, flat.numel() if block_size is None else min(block_size, flat.numel()))
    padding = -flat.numel() % size
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return flat.view(-1, size)
