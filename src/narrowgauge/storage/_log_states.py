"""Moments in codes whose steps follow the moment: `log8` and `log4`, each codec beside its specification.

Two things go wrong with a moment in 8 bits that better maps only make smaller. Both have a remedy that costs no
byte.

**A first moment is rounded at every step**, and each error moves the weight at every later step until the
average has forgotten it. But the optimizer sees the error when it makes it, and the update is linear in the
first moment: what the error would have added to the weight, all later steps together, can be added at once. The
storage gives the weight what it cannot keep (*error feedback*), and the weight comes as far as it would have come,
only some steps earlier.

**A second moment moves by a thousandth a step** (beta2 = 0.999), less than half a code: rounded to nearest it
stands still. It is rounded *stochastically*, up or down by chance in proportion, and follows in the mean. A first
moment is rounded to nearest: an error is then never larger than the element, which is what the weight is given.

Second moments have equal steps of the bit pattern (`LogUnsignedState`), first moments evenly spaced codes in units
of the root of the second (`NormalizedState`). A first moment without a second has logarithmic codes with a sign in
8 bits (`LogSignedState`); in 4 bits its unit is 1.

What a class's docstring fixes is fixed for every kernel, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.kernels._codec import Codec
from narrowgauge.storage._blockwise import LARGEST, SMALLEST, chunks, from_blocks, to_blocks
from narrowgauge.storage._states import (
    CodedState,
    StateContext,
    StateStorage,
    Tensors,
    add_storage,
    is_unknown,
)

_SMALLEST_PATTERN = 1 << 23  # of the smallest normal number
_INFINITY = 0x7F800000


def _encoded(
    blocks: Tensor, numbers: Tensor, encode: Callable[[slice], tuple[Tensor, Tensor]], context: StateContext
) -> tuple[Tensor, Tensor]:
    """Codes in the moment's shape, and numbers a block: chunks of blocks, one after the other."""
    codes = torch.empty_like(blocks, dtype=torch.uint8)
    for chunk in chunks(blocks):
        codes[chunk], numbers[chunk] = encode(chunk)
    return from_blocks(codes, context.shape, context.block_size), numbers


def _decoded(codes: Tensor, decode: Callable[[Tensor, slice], Tensor], context: StateContext) -> Tensor:
    """Float32 values in the codes' shape."""
    blocks = to_blocks(codes, context.block_size)
    values = torch.empty_like(blocks, dtype=torch.float32)
    for chunk in chunks(blocks):
        values[chunk] = decode(blocks[chunk], chunk)
    return from_blocks(values, codes.shape, context.block_size)


def _pattern(x: Tensor) -> Tensor:
    """A float32 tensor as the integers that its bits are."""
    return x.contiguous().view(torch.int32)


@dataclass(frozen=True)
class LogUnsignedState(CodedState):
    """Equal steps of a float's bit pattern, from a block's least element to its largest: for second moments.

    A moment may span many orders of magnitude inside one block, or hardly a factor of two. A fixed map spends its
    codes on orders of magnitude whether they are there or not; these codes are spread over those that are. The
    logarithm they are spread on needs no logarithm: read as an integer, a positive float *is* 2^23 (log2(x) + 127),
    but for a straight line in place of the curve inside each binade. Integers are the same on every device, and so
    are the codes.

    In 8 bits a step is a power of two: a code is the pattern without its lowest bits, counted from the block's
    least. So it is a float with as many mantissa bits as the block's range leaves room for (7 in one binade, 2 in
    forty), and a number that was kept once is kept again unchanged. To decode is to multiply and add two integers,
    to encode is to add and to shift. In 4 bits half of fifteen codes is too many to lose, and a range that is wider
    than it must be widens with every step: steps are whole patterns from the least element itself.

    - Code 0 is zero. Code k from 1 on is the float with pattern base + (k - 1) * step. In 8 bits step is 2^s and
      base a multiple of it; a block keeps base + s, in one 32-bit word. In 4 bits it keeps base and step. A block
      of zeros has zeros.
    - Magnitudes below 2^-126 and negative numbers count as zero; infinities and NaN as the block's largest finite
      element, and as float32's largest number where there is none. No other element becomes zero, because the
      update divides by it: an element more than 63 binades (48 in 4 bits) below the largest counts as 63 (48)
      binades below.
    - With lo and hi the least and the largest pattern above zero: in 8 bits s from 12 on is the smallest for which
      ceil(hi / 2^s) - floor(lo / 2^s) <= 254, base = floor(lo / 2^s) 2^s. In 4 bits base = lo, step is
      ceil((hi - lo) / 14), and 1 at least.
    - Pattern b has the code floor((b - base + d) / step) + 1. d is half a step to round to nearest, or floor(r step
      / 2^16) with 16 random bits r to round stochastically. What would be more than float32's largest number has
      the code below.
    """

    stochastic: bool = True

    def for_slot(self, signed: bool, has_normalizer: bool) -> StateStorage:
        if not signed:
            return self
        # Seven magnitudes are too few for a logarithm.
        return (NormalizedState if has_normalizer or self.bits == 4 else LogSignedState)(self.name, bits=self.bits)

    def codec(self, signed: bool) -> Codec | None:
        words = self.words("ranges", "int32", per_block=1 if self.bits == 8 else 2)
        files = ("random.h", "log_unsigned.h")
        return Codec(f"log_unsigned{self.bits}", words, files, needs_random=True, registers=88)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        blocks = to_blocks(moment, context.block_size)
        bits = None if random is None else to_blocks(random, context.block_size)
        shape = (blocks.shape[0],) if self.bits == 8 else (blocks.shape[0], 2)
        ranges = torch.zeros(shape, dtype=torch.int32, device=moment.device)

        def encode(chunk: slice) -> tuple[Tensor, Tensor]:
            return self._encode(blocks[chunk], None if bits is None else bits[chunk])

        codes, ranges = _encoded(blocks, ranges, encode, context)
        return {"codes": self._pack(codes), "ranges": ranges}

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        def decode(codes: Tensor, chunk: slice) -> Tensor:
            base, step = self.base_and_step(tensors["ranges"][chunk])
            code = codes.to(torch.int32)
            return torch.where(code > 0, base + (code - 1) * step, 0).view(torch.float32)

        return _decoded(self._unpack(tensors["codes"], context.shape), decode, context)

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        ranges = tensors["ranges"]
        words = ranges[:, None] if self.bits == 8 else ranges
        base, step = self.base_and_step(ranges)
        narrowest, widest = (1 << 12, 1 << 23) if self.bits == 8 else (1, 1 << 28)
        sound = (base >= _SMALLEST_PATTERN) & (base < _INFINITY) & (step >= narrowest) & (step <= widest)
        return None if (sound.squeeze(1) | (words == 0).all(dim=1)).all() else "an invalid block range"

    def base_and_step(self, ranges: Tensor) -> tuple[Tensor, Tensor]:
        """The pattern of code 1, and the step from one code to the next: int32 (blocks, 1)."""
        if self.bits == 4:
            return ranges[:, :1], ranges[:, 1:]
        return (ranges & ~0xFFF)[:, None], (1 << (ranges & 0xFFF).clamp_max(30))[:, None]

    def _encode(self, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
        pattern = _pattern(x)
        wild = (pattern & 0x7FFFFFFF) >= _INFINITY
        there = (pattern >= _SMALLEST_PATTERN) & ~wild
        hi = torch.where(there, pattern, 0).amax(dim=1, keepdim=True)
        wild &= ~torch.isneginf(x)
        hi = torch.where((hi == 0) & wild.any(dim=1, keepdim=True), _INFINITY - 1, hi)
        lo = torch.where(there, pattern, _INFINITY - 1).amin(dim=1, keepdim=True)
        span = (63 if self.bits == 8 else 48) << 23
        lo = torch.maximum(torch.minimum(lo, hi), (hi - span).clamp_min(_SMALLEST_PATTERN))
        ranges = torch.where(hi > 0, self._range(lo, hi), 0).squeeze(1)
        base, step = self.base_and_step(ranges)
        pattern = torch.where(wild, hi, torch.where(there, torch.maximum(pattern, lo), 0))
        d = step >> 1 if random is None else ((random.to(torch.int64) * step) >> 16).to(torch.int32)
        code = torch.div(pattern - base + d, step.clamp_min(1), rounding_mode="floor")
        highest = torch.div(_INFINITY - 1 - base, step.clamp_min(1), rounding_mode="floor")
        code = torch.where(pattern > 0, torch.minimum(code, highest) + 1, 0)
        return code.to(torch.uint8), ranges

    def _range(self, lo: Tensor, hi: Tensor) -> Tensor:
        """What blocks between two patterns keep; (blocks, 1), or (blocks, 2) in 4 bits."""
        steps = (1 << self.bits) - 2  # between the lowest code above zero and the highest
        if self.bits == 4:
            return torch.cat([lo, ((hi - lo + steps - 1) // steps).clamp_min(1)], dim=1)
        s = _bit_length((hi - lo) >> 8).clamp_min(12)
        s = s + (((hi + (1 << s) - 1) >> s) - (lo >> s) > steps).to(torch.int32)
        return ((lo >> s) << s) + s


def _bit_length(x: Tensor) -> Tensor:
    """How many bits an integer from 0 to 2^24 takes; read off the exponent of the float that it is exactly."""
    return ((x.to(torch.float32).view(torch.int32) >> 23) - 126).clamp_min(0)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MINUS = 8  # the sign of a 4-bit code


@dataclass(frozen=True)
class NormalizedState(CodedState):
    """Evenly spaced codes in units of the root of the second moment, and one float32 scale a block.

    An element of m is never much larger than the root of the same element of v, and the update is their quotient.
    In that unit all elements of a block have about one scale, whatever their gradients' scales are: a few evenly
    spaced codes serve them, with one number a block. And an error is in proportion to the element's own step: what
    the weight is given is never more than a fixed share of a step.

    The unit is the largest power of two that is not above the root. Its exponent is half of v's, a shift of
    integers, and dividing by it is exact, so that codes are the same on every device.

    - The unit of an element of v with biased exponent E is 2^(floor((E + 127) / 2) - 127); of a zero, 2^-64; of a
      NaN, whatever its sign, 2^64. Without a second moment it is 1.
    - q is the element over its unit, and zero for what is not finite. Zero, too, where v is below 2^-126 and |q| at
      least 64: a v that was kept as zero is no unit, and would leave nothing of the block. A block keeps its scale,
      the largest |q| over 127 (8 bits) or over 6 (4 bits), rounded to float32; a scale below 2^-126 is zero, and so
      is the block.
    - q is divided by the scale as a multiplication with 1 / scale, quotient and product rounded to float32. 8 bits:
      the code is the nearest integer, ties to even, in two's complement. 4 bits: the nearest of the magnitudes 0,
      1/2, 1, 3/2, 2, 3, 4, 6, ties to the smaller, and the highest bit is the sign.
    - A code is its number times the scale, rounded to float32, times the unit.
    """

    normalized: bool = True
    error_feedback: bool = True

    def codec(self, signed: bool) -> Codec | None:
        name, words = f"normalized{self.bits}", self.words("scales")
        return Codec(name, words, ("normalized.h",), normalized=True, error_feedback=True)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        v = context.normalizer
        q = moment if v is None else torch.where(is_unknown(moment, v), 0.0, moment / unit_of(v))
        blocks = to_blocks(q, context.block_size)
        scales = torch.zeros(blocks.shape[0], dtype=torch.float32, device=moment.device)
        codes, scales = _encoded(blocks, scales, lambda chunk: self._encode(blocks[chunk]), context)
        return {"codes": self._pack(codes), "scales": scales}

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        def decode(codes: Tensor, chunk: slice) -> Tensor:
            return self._numbers(codes) * tensors["scales"][chunk, None]

        quotients = _decoded(self._unpack(tensors["codes"], context.shape), decode, context)
        return quotients if context.normalizer is None else quotients * unit_of(context.normalizer)

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        return super().validate(tensors, signed=False)  # its scales have no sign, though its codes do

    def _encode(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.where(torch.isfinite(q), q, 0.0)
        top = q.abs().amax(dim=1, keepdim=True)
        # Tensor by tensor: torch multiplies by a rounded reciprocal where either is a number of the host.
        scale = top / torch.full_like(top, 127.0 if self.bits == 8 else _E2M1[-1])
        scale = torch.where(scale >= SMALLEST, scale, 0.0)
        scaled = q * torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
        if self.bits == 8:
            return scaled.round().to(torch.int8).view(torch.uint8), scale.squeeze(1)
        levels = _levels(q.device)
        code = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
        return torch.where((scaled < 0) & (code > 0), code + _MINUS, code).to(torch.uint8), scale.squeeze(1)

    def _numbers(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.int8).to(torch.float32)
        number = _levels(codes.device)[(codes & (_MINUS - 1)).to(torch.int32)]
        return torch.where(codes >= _MINUS, -number, number)


def unit_of(v: Tensor) -> Tensor:
    """The unit for each element of a second moment: float32 powers of two in its shape."""
    # Only a NaN can have a sign. With it the unit would be the smallest, not the largest, and the quotient so large
    # that nothing is left of the block.
    exponent = (_pattern(v) & 0x7FFFFFFF) >> 23
    return (((exponent + 127) >> 1) << 23).view(torch.float32)


@functools.lru_cache(maxsize=16)  # made once: copying it to a GPU waits for the device, and cannot be captured
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1, dtype=torch.float32, device=device)


_OFFSET = 8.0  # c over the least magnitude
_STEPS = 127
_SIGN = 128


@dataclass(frozen=True)
class LogSignedState(CodedState):
    """Logarithmic codes with a sign, linear near zero, and two float32 numbers a block: for a moment by itself.

    127 magnitudes and a sign. The steps are those of |x| + c, from c, which is zero, to the largest |x| + c of the
    block: equal in size up to c, roughly in ratio above. The logarithm is the float's bit pattern read as an
    integer, as in `LogUnsignedState`. c is a power of two, 8 times the least magnitude above zero or the next
    below, though no less than 2^-24 of the largest: the least elements get equal steps, others logarithmic ones.

    - Magnitudes below 2^-126 and NaN count as zero. Infinities take the code of the largest finite element; where
      there is none, of float32's largest number.
    - With lo and hi the patterns of c and of the largest |x| + c, an element for which |x| + c has the pattern b
      has the magnitude k = floor((floor((b - lo) * r) + 2^15) / 2^16), where r = 2^16 * 127 / (hi - lo) and b - lo
      are rounded to float32, and so is their product. The largest element has k = 127. The code is k, and 128 + k
      if x is negative and k is not 0.
    - k is the float with pattern lo + round(k * ((hi - lo) / 127)), all rounded to float32, ties to even, minus c;
      127 is the largest element itself. A block keeps c and the largest magnitude.

    The error is never larger than the element.
    """

    error_feedback: bool = True

    def codec(self, signed: bool) -> Codec | None:
        words = self.words("ranges", per_block=2)
        return Codec("log_signed", words, ("lookup.h", "log_signed.h"), error_feedback=True)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        blocks = to_blocks(moment, context.block_size)
        ranges = torch.zeros(blocks.shape[0], 2, dtype=torch.float32, device=moment.device)
        codes, ranges = _encoded(blocks, ranges, lambda chunk: self._encode(blocks[chunk]), context)
        return {"codes": codes, "ranges": ranges}

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        return _decoded(
            tensors["codes"], lambda codes, chunk: self._decode(codes, tensors["ranges"][chunk]), context
        )

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        ranges = tensors["ranges"]
        return None if (torch.isfinite(ranges) & (ranges >= 0)).all() else "a range that is negative or not finite"

    @staticmethod
    def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = x.abs()
        magnitude = torch.where(magnitude >= SMALLEST, magnitude, 0.0)  # NaN compares false: zero
        infinite = torch.isinf(magnitude)
        finite = torch.where(infinite, 0.0, magnitude)
        top = finite.amax(dim=1, keepdim=True)
        top = torch.where((top == 0) & infinite.any(dim=1, keepdim=True), LARGEST, top)
        magnitude = torch.where(infinite, top, magnitude)
        least = torch.where(finite > 0, finite, LARGEST).amin(dim=1, keepdim=True)
        ranges = torch.cat([_foot(least, top), top], dim=1)
        lo, hi, foot = _ends(ranges)
        span = (hi - lo).to(torch.float32)
        # Tensor by tensor: torch multiplies by a rounded reciprocal where either is a number of the host.
        rate = torch.where(span > 0, torch.full_like(span, _STEPS << 16) / span, 0.0)
        fine = ((_pattern(magnitude + foot) - lo).clamp_min(0).to(torch.float32) * rate).to(torch.int32)
        code = torch.where(magnitude == top, _STEPS, ((fine + (1 << 15)) >> 16).clamp_max(_STEPS))
        code = torch.where((x < 0) & (code > 0), code + _SIGN, code)
        return torch.where(magnitude > 0, code, 0).to(torch.uint8), ranges

    @staticmethod
    def _decode(codes: Tensor, ranges: Tensor) -> Tensor:
        lo, hi, foot = _ends(ranges)
        span = (hi - lo).to(torch.float32)
        step = span / torch.full_like(span, _STEPS)
        code = codes.to(torch.int32)
        index = code & (_SIGN - 1)
        value = (lo + (index.to(torch.float32) * step).round().to(torch.int32)).view(torch.float32) - foot
        value = torch.where(index == _STEPS, ranges[:, 1:], value)
        return torch.where(code >= _SIGN, -value, value)


def _foot(least: Tensor, top: Tensor) -> Tensor:
    """c of each block; 0 where all is zero."""
    foot = torch.maximum(least * _OFFSET, top * 2.0**-24)
    foot = torch.minimum(foot, top * 2).clamp(SMALLEST, LARGEST)
    return torch.where(top > 0, (_pattern(foot) & _INFINITY).view(torch.float32), 0.0)


def _ends(ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The patterns between which the steps lie, and c; (blocks, 1) each."""
    foot, top = ranges[:, :1], ranges[:, 1:]
    return _pattern(foot), _pattern(top + foot), foot


for _storage in (LogUnsignedState("log8"), LogUnsignedState("log4", bits=4)):
    add_storage(_storage)
