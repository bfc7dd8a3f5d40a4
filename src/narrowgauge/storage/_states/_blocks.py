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
    pack_pairs,
    scale_blocks,
    unpack_pairs,
)
from narrowgauge.storage._states._floats import StateContext, StateStorage, Words


@dataclass(frozen=True)
class CodedState(StateStorage):
    """The base of what keeps codes, and float32 numbers a block.

    Attributes:
        bits: of a code; those of 4 bits are kept two a byte.
    """

    dtype: torch.dtype = torch.uint8
    quantized: bool = True
    rounded: bool = False
    bits: int = 8

    def nbytes(self, numel: int, block_size: int) -> int:
        return -(-numel * self.bits // 8) + 4 * block_count(numel, block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> Words:
        # One element is encoded and repeated: loading a state asks for this more than once a moment.
        zero = torch.zeros(1, dtype=torch.float32, device=p.device)
        words = self.encode(zero, StateContext(zero.shape, signed, 1))
        codes = _repeated(words.pop("codes")[0], p.shape)
        count = block_count(p.numel(), block_size)
        numbers = {name: _repeated(word, (count, *word.shape[1:])) for name, word in words.items()}
        return {"codes": self._pack(codes)} | numbers

    def codes(self, words: Words, shape: torch.Size) -> Tensor:
        return self._unpack(words["codes"], shape).view(torch.uint8)

    def flaw(self, words: Words, signed: bool) -> str | None:
        scales = words["scales"]
        if not torch.isfinite(scales).all():
            return "a scale that is not finite"
        return "a negative scale" if not signed and bool((scales < 0).any()) else None

    def accumulate(self, words: Words, x: Tensor, decay: float, share: float) -> Words:
        raise NotImplementedError(f"{self.name} states have no arithmetic of their own")

    def value(self, words: Words) -> Tensor:
        raise NotImplementedError(f"{self.name} states have no arithmetic of their own")

    def _pack(self, codes: Tensor) -> Tensor:
        """Codes as they are kept: those of 4 bits two a byte, the first in its lower half."""
        return codes if self.bits == 8 else pack_pairs(codes)

    def _unpack(self, codes: Tensor, shape: torch.Size) -> Tensor:
        """What `_pack` was given, in this shape."""
        return codes if self.bits == 8 else unpack_pairs(codes, shape)


def _repeated(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.expand(shape).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class BlockwiseState(CodedState):
    """Codes of a codebook and one float32 scale a block."""

    codebook: str = "dynamic"

    def decode(self, words: Words, context: StateContext) -> Tensor:
        codes = self._unpack(words["codes"], context.shape)
        values = self.coder(context.signed, codes.device).values
        return decode_blocks(codes, words["scales"], values, context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        codes, scales = encode_blocks(moment, self.coder(context.signed, moment.device), context.block_size)
        return {"codes": self._pack(codes), "scales": scales}

    def coder(self, signed: bool, device: torch.device) -> Coder:
        return coder(self.codebook, signed, device, self.bits)


@dataclass(frozen=True)
class FourBitState(BlockwiseState):
    """Two codes a byte, and one float32 scale a block.

    A first moment takes the 4-bit dynamic map. A second moment takes 1/16, 2/16, ... 1: it has no zero, because
    what rounds to zero divides. A block of zeros stays zeros, by its scale.

    Source: Li et al. 2023, Memory Efficient Optimizers with 4-bit States (the zero-point problem).
    """

    bits: int = 4

    def coder(self, signed: bool, device: torch.device) -> Coder:
        return super().coder(signed, device) if signed else _sixteenths(device)


@functools.lru_cache(maxsize=16)
def _sixteenths(device: torch.device) -> Coder:
    return Coder.positive((torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16).to(device))


@dataclass(frozen=True)
class Float8State(CodedState):
    """Numbers of float8 e4m3 and one float32 scale a block: x is the number times the scale.

    The scale is the block's absolute maximum over 448, so that its largest element is the format's largest number
    (and comes back but for a rounding of float32); what hardware converts, and what a float8 matrix multiply takes.
    Normalised and bounded as blocks of codes are (see `quantize`).
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def decode(self, words: Words, context: StateContext) -> Tensor:
        return scale_blocks(words["codes"].to(torch.float32), words["scales"], context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        lowest = -1.0 if context.signed else 0.0
        normalised, extrema = normalise_blocks(moment, lowest, context.block_size)
        largest = FP8_E4M3.max
        # By a tensor: a GPU divides by a number as a product with its reciprocal, which is rounded twice.
        scales = extrema / torch.full_like(extrema, largest)
        return {"codes": round_to(normalised * largest, FP8_E4M3), "scales": scales}

    def flaw(self, words: Words, signed: bool) -> str | None:
        codes = words["codes"].view(torch.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            return "codes that are NaN"
        if not signed and (codes > 0x80).any():
            return "negative codes"
        return super().flaw(words, signed)
