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

Second moments have logarithmic codes (`_log_codes`), first moments evenly spaced ones in units of the root of
the second (`_relative_codes`). A first moment without a second has logarithmic codes in 8 bits; in 4 bits it is
alone in its block's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import block_count
from narrowgauge.storage._log_codes import LogCodes
from narrowgauge.storage._relative_codes import RelativeCodes
from narrowgauge.storage._states._blocks import CodedState
from narrowgauge.storage._states._floats import StateContext, StateStorage, Words


@dataclass(frozen=True)
class LogState(CodedState):
    """Logarithmic codes and two float32 numbers a block: its range."""

    def for_slot(self, signed: bool, beside: bool) -> StateStorage:
        # Seven magnitudes are too few for a logarithm.
        return RelativeState(self.name, bits=self.bits) if signed and (beside or self.bits == 4) else self

    def hands_over(self, signed: bool) -> bool:
        return signed

    def stochastic(self, signed: bool) -> bool:
        return not signed

    def nbytes(self, numel: int, block_size: int) -> int:
        return super().nbytes(numel, block_size) + 4 * block_count(numel, block_size)

    def decode(self, words: Words, context: StateContext) -> Tensor:
        codes = self._unpack(words["codes"], context.shape)
        return self._codes(context.signed).decode(codes, words["ranges"], context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        codes, ranges = self._codes(context.signed).encode(moment, context.block_size, random)
        return {"codes": self._pack(codes), "ranges": ranges}

    def flaw(self, words: Words, signed: bool) -> str | None:
        ranges = words["ranges"]
        return None if (torch.isfinite(ranges) & (ranges >= 0)).all() else "a range that is negative or not finite"

    def _codes(self, signed: bool) -> LogCodes:
        return LogCodes(signed, self.bits, 24 if signed else 48)


@dataclass(frozen=True)
class RelativeState(CodedState):
    """Evenly spaced codes in units of the root of a second moment, and one float32 number a block."""

    relative: bool = True

    def hands_over(self, signed: bool) -> bool:
        return True

    def decode(self, words: Words, context: StateContext) -> Tensor:
        codes = self._unpack(words["codes"], context.shape)
        return RelativeCodes(self.bits).decode(codes, words["largest"], context.beside, context.block_size)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Words:
        codes, largest = RelativeCodes(self.bits).encode(moment, context.beside, context.block_size)
        return {"codes": self._pack(codes), "largest": largest}

    def flaw(self, words: Words, signed: bool) -> str | None:
        largest = words["largest"]
        sound = torch.isfinite(largest) & (largest >= 0)
        return None if sound.all() else "a scale that is negative or not finite"
