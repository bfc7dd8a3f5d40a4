"""Moments in blocks: codes of a codebook, or float8 numbers, and one float32 scale a block."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import FP8_E4M3, Coder, coder, round_to
from narrowgauge.storage._blockwise import (
    block_count,
    decode_blocks,
    encode_blocks,
    normalise_blocks,
    scale_blocks,
)
from narrowgauge.storage._states._floats import StateStorage, Words


@dataclass(frozen=True)
class BlockwiseState(StateStorage):
    """Codes of a codebook and one float32 scale a block."""

    codebook: str = "dynamic"

    def nbytes(self, numel: int, block_size: int) -> int:
        return numel * self.dtype.itemsize + 4 * block_count(numel, block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        zero = coder(self.codebook, signed, p.device).encode(p.new_zeros(()))
        scales = torch.zeros(block_count(p.numel(), block_size), dtype=torch.float32, device=p.device)
        return {"codes": zero.expand(p.shape).clone(memory_format=torch.contiguous_format), "scales": scales}

    def decode(
        self, words: Words, shape: torch.Size, signed: bool, block_size: int, beside: Tensor | None = None
    ) -> Tensor:
        values = coder(self.codebook, signed, words["codes"].device).values
        return decode_blocks(words["codes"], words["scales"], values, block_size)

    def encode(
        self,
        moment: Tensor,
        signed: bool,
        block_size: int,
        random: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> Words:
        codes, scales = encode_blocks(moment, coder(self.codebook, signed, moment.device), block_size)
        return {"codes": codes, "scales": scales}

    def flaw(self, words: Words, signed: bool) -> str | None:
        scales = words["scales"]
        if not torch.isfinite(scales).all():
            return "a scale that is not finite"
        return "a negative scale" if not signed and bool((scales < 0).any()) else None

    def accumulate(self, words: Words, x: Tensor, decay: float, share: float) -> Words:
        raise NotImplementedError(f"{self.name} states have no arithmetic of their own")

    def value(self, words: Words) -> Tensor:
        raise NotImplementedError(f"{self.name} states have no arithmetic of their own")


@dataclass(frozen=True)
class Float8State(BlockwiseState):
    """Numbers of float8 e4m3 and one float32 scale a block: x is the number times the scale.

    The scale is the block's absolute maximum over 448, so that its largest element is the format's largest number
    (and comes back but for a rounding of float32); what hardware converts, and what a float8 matrix multiply takes.
    Normalised and bounded as blocks of codes are (see `quantize`).
    """

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        scales = torch.zeros(block_count(p.numel(), block_size), dtype=torch.float32, device=p.device)
        return {"codes": torch.zeros(p.shape, dtype=self.dtype, device=p.device), "scales": scales}

    def decode(
        self, words: Words, shape: torch.Size, signed: bool, block_size: int, beside: Tensor | None = None
    ) -> Tensor:
        values = words["codes"].to(torch.float32)
        return scale_blocks(values, words["scales"], block_size)

    def encode(
        self,
        moment: Tensor,
        signed: bool,
        block_size: int,
        random: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> Words:
        normalised, extrema = normalise_blocks(moment, -1.0 if signed else 0.0, block_size)
        largest = FP8_E4M3.max
        return {"codes": round_to(normalised * largest, FP8_E4M3), "scales": extrema / largest}

    def flaw(self, words: Words, signed: bool) -> str | None:
        codes = words["codes"].view(torch.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            return "codes that are NaN"
        if not signed and (codes > 0x80).any():
            return "negative codes"
        return super().flaw(words, signed)


@dataclass(frozen=True)
class FourBitState(BlockwiseState):
    """Two codes a byte, and one float32 scale a block.

    A first moment takes the 4-bit dynamic map. A second moment takes 1/16, 2/16, ... 1: it has no zero, because
    what rounds to zero divides. A block of zeros stays zeros, by its scale.

    Source: Li et al. 2023, Memory Efficient Optimizers with 4-bit States (the zero-point problem).
    """

    def nbytes(self, numel: int, block_size: int) -> int:
        return (numel + 1) // 2 + 4 * block_count(numel, block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        zeros = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        return self.encode(zeros, signed, block_size)

    def decode(
        self, words: Words, shape: torch.Size, signed: bool, block_size: int, beside: Tensor | None = None
    ) -> Tensor:
        codes = unpacked(words["codes"], shape)
        return decode_blocks(codes, words["scales"], _four_bits(signed, codes.device).values, block_size)

    def encode(
        self,
        moment: Tensor,
        signed: bool,
        block_size: int,
        random: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> Words:
        codes, scales = encode_blocks(moment, _four_bits(signed, moment.device), block_size)
        return {"codes": packed(codes), "scales": scales}


def packed(codes: Tensor) -> Tensor:
    """4-bit codes of any shape, two a byte, the first in its lower half."""
    pairs = torch.nn.functional.pad(codes.reshape(-1), (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpacked(codes: Tensor, shape: torch.Size) -> Tensor:
    """What `packed` made of codes of this shape."""
    return torch.stack([codes & 0xF, codes >> 4], dim=1).reshape(-1)[: shape.numel()].reshape(shape)


@functools.lru_cache(maxsize=16)
def _four_bits(signed: bool, device: torch.device) -> Coder:
    if signed:
        return coder("dynamic", True, device, 4)
    return Coder.positive((torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16).to(device))
