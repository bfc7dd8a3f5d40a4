"""Moments rounded so that nothing is lost in the long run.

Two things go wrong with a moment in 8 bits that better maps only make smaller. Both have a remedy that costs no
byte.

**A first moment is rounded at every step**, and each error moves the weight at every later step until the
average has forgotten it. But the optimizer sees the error when it makes it, and the update is linear in the
first moment: what the error would have added to the weight, all later steps together, can be added at once. The
storage *hands over* to the weight what it cannot keep, and the weight comes as far as it would have come, only
some steps earlier.

**A second moment moves by a thousandth a step** (beta2 = 0.999), less than half a code: rounded to nearest it
stands still. It is rounded *stochastically*, up or down by chance in proportion, and follows in the mean. A
first moment is rounded to nearest: an error is then never larger than the element, which is what is handed
over.

Second moments are kept in equal steps of the bit pattern (`_pattern_codes`), first moments in evenly spaced
codes in units of the root of the second (`_relative_codes`). A first moment without a second has logarithmic
codes in 8 bits (`_log_codes`); in 4 bits it is alone in its block's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import block_count
from narrowgauge.storage._log_codes import decode_logarithms, encode_logarithms
from narrowgauge.storage._pattern_codes import PatternCodes
from narrowgauge.storage._relative_codes import RelativeCodes
from narrowgauge.storage._states._blocks import CodedState
from narrowgauge.storage._states._floats import StateContext, StateStorage, Words


@dataclass(frozen=True)
class LogState(CodedState):
    """Steps of the bit pattern, rounded stochastically; where they begin, how wide: 4 bytes a block, 8 with 4 bits.

    It is what a second moment is kept in; other moments have storages of their own.
    """

    def for_slot(self, signed: bool, beside: bool) -> StateStorage:
        if not signed:
            return self
        # Seven magnitudes are too few for a logarithm.
        return (RelativeState if beside or self.bits == 4 else SignedLogState)(self.name, bits=self.bits)

    def stochastic(self, signed: bool) -> bool:
        return True

    def nbytes(self, numel: int, block_size: int) -> int:
        return super().nbytes(numel, block_size) + (4 * block_count(numel, block_size) if self.bits == 4 else 0)

    def decode(self, words: Words, context: StateContext) -> Tensor:
        codes = self._unpack(words["codes"], context.shape)
        return self._codes.decode(codes, words["ranges"], context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        codes, ranges = self._codes.encode(moment, context.block_size, random)
        return {"codes": self._pack(codes), "ranges": ranges}

    def flaw(self, words: Words, signed: bool) -> str | None:
        return None if self._codes.sound(words["ranges"]).all() else "a range that is none"

    @property
    def _codes(self) -> PatternCodes:
        return PatternCodes(self.bits)


@dataclass(frozen=True)
class RelativeState(CodedState):
    """Evenly spaced codes in units of the root of a second moment, and one float32 scale a block."""

    relative: bool = True

    def hands_over(self, signed: bool) -> bool:
        return True

    def decode(self, words: Words, context: StateContext) -> Tensor:
        codes = self._unpack(words["codes"], context.shape)
        return RelativeCodes(self.bits).decode(codes, words["scales"], context.beside, context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        codes, scales = RelativeCodes(self.bits).encode(moment, context.beside, context.block_size)
        return {"codes": self._pack(codes), "scales": scales}

    def flaw(self, words: Words, signed: bool) -> str | None:
        return super().flaw(words, signed=False)  # its scales have no sign, though its codes do


@dataclass(frozen=True)
class SignedLogState(CodedState):
    """Logarithmic codes with a sign, linear near zero, and two float32 numbers a block: its range."""

    def hands_over(self, signed: bool) -> bool:
        return True

    def nbytes(self, numel: int, block_size: int) -> int:
        return super().nbytes(numel, block_size) + 4 * block_count(numel, block_size)

    def decode(self, words: Words, context: StateContext) -> Tensor:
        return decode_logarithms(words["codes"], words["ranges"], context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        codes, ranges = encode_logarithms(moment, context.block_size)
        return {"codes": codes, "ranges": ranges}

    def flaw(self, words: Words, signed: bool) -> str | None:
        ranges = words["ranges"]
        return None if (torch.isfinite(ranges) & (ranges >= 0)).all() else "a range that is negative or not finite"
