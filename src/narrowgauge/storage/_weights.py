"""Weight storages: what is kept beside the parameter, and how an update is added to it.

The model computes with the parameter, in bf16 say, where a step below half a unit in the last place is lost. A
weight storage decides what becomes of that remainder: it is dropped (`plain`), carried over (`kahan`), kept as
part of the weight (`expansion`, `split`, `split8`, `split4`, `master`), or paid out at random (`stochastic`; of
`split4`, what its word has no place for).

A storage keeps at most one extra tensor, the *low word*, of the parameter's shape; 4-bit words are flat, two a
byte. It knows two arithmetics:

* `read` and `add` work in float32 registers and round once, on write.
* `operand` and `add_rounded` round every operation to the words' own format, as the papers' algorithms are
  written; storages whose low word is an integer have no such arithmetic.

External writes to the parameter take precedence: a master copy that no longer rounds to the parameter is rebuilt
from it, and a low word left over counts for at most half a unit in the parameter's last place.

**Split weights.** A float32 read as a 32-bit integer is sign, exponent, fraction, in that order, so its upper half
*is* a bf16 and integer arithmetic on the pattern moves the magnitude by units in the last place. Rounding the
pattern to its upper 16 bits (halves away from zero) gives the bf16 word hi; what is left over, between -2^15 and
2^15 - 1, is the low word lo = bits - (hi << 16). Both together are the exact float32, in the same 4 bytes as the
float32 alone, while the model computes with hi. Rounding the pattern to its upper 24 bits first leaves 8 bits for
lo: a 24-bit weight in 3 bytes. With the upper 20 bits 4 are left. To nearest such a weight would stand still at
small rates, as bf16 does, so it is rounded stochastically.

A hi that was changed from outside keeps its stale lo. That may move the weight by half a unit in the last place
of the new hi, but never across zero and never into NaN. (An infinite hi with a negative lo is how a float32 in
the last half unit below bf16's overflow is kept.)

Sources: Collage, Algorithm 2 (expansion) and Appendix B (kahan, stochastic); Micikevicius et al. 2018 (master).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, bitwise_left_shift, bitwise_right_shift

from narrowgauge._arguments import check_choice
from narrowgauge.formats import FloatFormat, round_with_bits
from narrowgauge.kernels._codec import KINDS, Codec, Word, disown
from narrowgauge.storage._blockwise import pack_pairs, unpack_pairs
from narrowgauge.storage._expansion import grow
from narrowgauge.storage._float8_weight import Float8Weight, from_words, next_scale, to_words

Noise = Callable[[], Tensor]
Written = tuple[Tensor, Tensor | None]

_HALVES = (torch.bfloat16, torch.float16)
# Shifts are written as functions: on a DTensor torch's operators << and >> return it unshifted (2.13).
_INFINITY = 0x7F80  # bf16's exponent field, all ones


class WeightStorage:
    """The parameter alone: what rounding cuts off is lost. Also the base that the other storages extend.

    Attributes:
        name: what users type.
        dtypes: parameter dtypes it takes.
        key: name of the low word, or None if there is none.
        rounded: whether it has the arithmetic of `operand` and `add_rounded`.
        float8: whether the parameter is a `Float8Weight`, which has the low word itself.
        random_bits: how many random bits an element `noise` gives, 32 or 8.
    """

    name = "plain"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *_HALVES)
    key: str | None = None
    rounded = True
    float8 = False
    random_bits = 32

    def low_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Dtype of the low word beside a parameter of this dtype; None without one."""
        return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        disown(cls, "read", "add")

    def codec(self, dtype: torch.dtype) -> Codec | None:
        """How kernels keep a weight of a parameter of this dtype; None if there are none."""
        low = self.low_dtype(dtype)
        return Codec(self.name, (Word("low", KINDS[low]),) if low is not None else ())

    def bytes_added(self, dtype: torch.dtype) -> float:
        """Bytes that an element of this dtype costs beyond itself."""
        low = self.low_dtype(dtype)
        return low.itemsize if low is not None else 0

    def low_shape(self, p: Tensor) -> Sequence[int]:
        """Shape of the low word beside a parameter."""
        return p.shape

    def init(self, p: Tensor) -> Tensor | None:
        """The low word of a parameter that has not been stepped yet."""
        low = self.low_dtype(p.dtype)
        return torch.zeros_like(p, dtype=low, memory_format=torch.preserve_format) if low is not None else None

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        """The weight in float32, as the rule sees it."""
        return p.to(torch.float32)

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        """The parameter and low word after the update.

        Args:
            p, low: what is stored.
            weight: what `read` gave for them.
            delta: the update, float32.
            noise: makes random integers of `random_bits` bits in p's shape; called by storages that round
                stochastically.
        """
        return (weight + delta).to(p.dtype), None

    def operand(self, p: Tensor, low: Tensor | None) -> Tensor:
        """The weight as a number of the storage's own format, as the strict equation sees it."""
        return p

    def add_rounded(self, p: Tensor, low: Tensor | None, delta: Tensor, noise: Noise) -> Written:
        """Like `add`, every operation rounded to the format; delta has that format."""
        return p + delta, None

    def exact(self, p: Tensor, low: Tensor | None) -> Tensor:
        """The value of all that is stored, in float64."""
        return self.read(p, low).to(torch.float64)


class Stochastic(WeightStorage):
    """No extra word: the updated weight is rounded stochastically, so the update is right in expectation."""

    name = "stochastic"
    dtypes = _HALVES

    def codec(self, dtype: torch.dtype) -> Codec | None:
        c = () if dtype == torch.bfloat16 else None
        return Codec(self.name, c=c, needs_random=True, wide_random=True)

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        return round_with_bits(weight + delta, FloatFormat.of(p.dtype), noise()), None

    def add_rounded(self, p: Tensor, low: Tensor | None, delta: Tensor, noise: Noise) -> Written:
        # The sum of two narrow numbers needs more than float32's digits at times; float64 holds it.
        return round_with_bits(p.to(torch.float64) + delta, FloatFormat.of(p.dtype), noise()), None


class Kahan(WeightStorage):
    """Kahan summation: what one addition cuts off is added to the next update.

    The rule sees the parameter alone. Source: Collage, Appendix B; Zamirai et al. 2020.
    """

    name = "kahan"
    dtypes = _HALVES
    key = "compensation"

    def codec(self, dtype: torch.dtype) -> Codec | None:
        return Codec(self.name, (Word("low", KINDS[dtype]),), pairs=dtype == torch.bfloat16)

    def low_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        assert low is not None
        owed = delta + _bounded(p, low).to(torch.float32)
        hi = (weight + owed).to(p.dtype)
        return hi, _finite(owed - (hi.to(torch.float32) - weight), hi).to(p.dtype)

    def add_rounded(self, p: Tensor, low: Tensor | None, delta: Tensor, noise: Noise) -> Written:
        assert low is not None
        owed = delta + _bounded(p, low)
        hi = p + owed
        return hi, _finite(owed - (hi - p), hi)

    def exact(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert low is not None
        return p.to(torch.float64) + _bounded(p, low).to(torch.float64)


class Expansion(Kahan):
    """The weight is the unevaluated sum hi + lo of two numbers of the parameter's format (Collage-light).

    The rule sees both words. Source: Collage, Algorithm 2, lines 3 and 13.
    """

    name = "expansion"
    key = "lo"
    codec = Kahan.codec

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert low is not None
        return p.to(torch.float32) + _bounded(p, low).to(torch.float32)

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        updated = weight + delta
        hi = updated.to(p.dtype)
        return hi, _finite(updated - hi.to(torch.float32), hi).to(p.dtype)

    def add_rounded(self, p: Tensor, low: Tensor | None, delta: Tensor, noise: Noise) -> Written:
        assert low is not None
        hi, lo = grow((p, _bounded(p, low)), delta)
        return hi, _finite(lo, hi)


class Split(WeightStorage):
    """An int16 low word: the bf16 parameter and it are together the exact float32 weight."""

    name = "split"
    dtypes = (torch.bfloat16,)
    key = "lo"
    rounded = False
    _word = torch.int16
    codec = WeightStorage.codec

    def low_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._word

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert low is not None
        return join(p, low)

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        return cut(weight + delta, self._word)


class Split8(Split):
    """An int8 low word in units of 1/256 of bf16's spacing: a 24-bit weight."""

    name = "split8"
    _word = torch.int8

    def codec(self, dtype: torch.dtype) -> Codec | None:
        return Codec(self.name, (Word("low", "int8"),), pairs=True)


class Split4(Split):
    """A 4-bit low word in units of 1/16 of bf16's spacing, rounded stochastically: a 20-bit weight.

    Words of neighbors in row-major order share a byte, the first in its lower half. Eight random bits decide: the
    probability to round up is the share of a unit that is cut off, to the nearest 256th. So an update arrives in
    the mean down to 2^-20 of the weight, where `split8` loses what is below 2^-16.
    """

    name = "split4"
    key = "codes"
    random_bits = 8
    _word = torch.uint8

    def codec(self, dtype: torch.dtype) -> Codec | None:
        return Codec(self.name, (Word("low", "uint8", packed=True),), needs_random=True, pairs=True)

    def bytes_added(self, dtype: torch.dtype) -> float:
        return 0.5

    def low_shape(self, p: Tensor) -> Sequence[int]:
        return (-(-p.numel() // 2),)

    def init(self, p: Tensor) -> Tensor:
        return torch.zeros(self.low_shape(p), dtype=self._word, device=p.device)

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert low is not None
        return join(p, to_bytes(low, p.shape))

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        updated = weight + delta
        # What is cut off are 12 bits.
        up = bitwise_left_shift(noise().to(torch.int32), 4) + 8
        rounded = ((updated.contiguous().view(torch.int32) + up) & ~0xFFF).view(torch.float32)
        hi, lo = cut(torch.where(torch.isfinite(updated), rounded, updated), torch.int8)
        return hi, to_nibbles(lo)


class Master(WeightStorage):
    """A float32 copy of the weight, which the parameter is the rounding of (the paper's option D)."""

    name = "master"
    dtypes = _HALVES
    key = "master"
    codec = WeightStorage.codec

    def low_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def init(self, p: Tensor) -> Tensor:
        return p.to(torch.float32)

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert low is not None
        return torch.where(low.to(p.dtype) == p, low, p.to(torch.float32))

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        updated = weight + delta
        return updated.to(p.dtype), updated

    def operand(self, p: Tensor, low: Tensor | None) -> Tensor:
        return self.read(p, low)

    def add_rounded(self, p: Tensor, low: Tensor | None, delta: Tensor, noise: Noise) -> Written:
        return self.add(p, low, self.read(p, low), delta, noise)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The float32 weight of a bf16 word and an int16 (32 bits) or int8 (24 bits) low word."""
    pattern = hi.view(torch.int16).to(torch.int32)
    magnitude = pattern & 0x7FFF
    offset = bitwise_left_shift(lo.to(torch.int32), 0 if lo.dtype == torch.int16 else 8)
    # A stale low word must not borrow below zero, nor carry infinity into NaN; NaN stays as it is.
    offset = torch.where(magnitude == 0, offset.clamp_min(0), offset)
    offset = torch.where(
        magnitude >= _INFINITY, torch.where(magnitude == _INFINITY, offset.clamp_max(0), 0), offset
    )
    return (bitwise_left_shift(pattern, 16) + offset).view(torch.float32)


def cut(weight: Tensor, low_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bf16 word and the low word of a float32 weight.

    Args:
        weight: float32 tensor.
        low_dtype: torch.int16 (hi and lo together are the weight, exactly) or torch.int8 (they are the weight
            rounded to 16 significant bits, halves away from zero).

    Returns:
        (hi, lo) of the weight's shape. Infinities and NaN are in hi, with lo = 0.
    """
    bits = weight.contiguous().view(torch.int32)
    sign, magnitude = bits & -0x80000000, bits & 0x7FFFFFFF
    if low_dtype == torch.int8:
        magnitude = (magnitude + 0x80) & ~0xFF
    rounded = bitwise_right_shift(magnitude + 0x8000, 16)
    lo = magnitude - bitwise_left_shift(rounded, 16)
    hi = (bitwise_right_shift(sign, 16) | rounded).to(torch.int16).view(torch.bfloat16)
    finite = torch.isfinite(weight)
    low = lo if low_dtype == torch.int16 else bitwise_right_shift(lo, 8)
    return torch.where(finite, hi, weight.to(torch.bfloat16)), torch.where(finite, low, 0).to(low_dtype)


def to_bytes(codes: Tensor, shape: torch.Size) -> Tensor:
    """The low words of `split4` as those of `split8`: int8 in this shape, the same weights."""
    return bitwise_left_shift(unpack_pairs(codes, shape), 4).view(torch.int8)


def to_nibbles(lo: Tensor) -> Tensor:
    """The low words of `split8` as those of `split4`: rounded to nearest, and the weight still rounds to its hi."""
    nearest = bitwise_right_shift(lo.to(torch.int16) + 8, 4).clamp_max(7)
    return pack_pairs(nearest.to(torch.uint8) & 0xF)


def _bounded(p: Tensor, low: Tensor) -> Tensor:
    """The low word, cut to half a unit in the parameter's last place: more is left over from another value."""
    info = torch.finfo(p.dtype)
    # The pattern with all but the exponent masked away is the power of two below |p|, exactly.
    power = (p.to(torch.float32).view(torch.int32) & 0x7F800000).view(torch.float32)
    half = torch.where(torch.isfinite(p), power.clamp_min(info.smallest_normal) * (info.eps / 2), 0.0).to(low.dtype)
    return torch.minimum(torch.maximum(low, -half), half)


def _finite(low: Tensor, hi: Tensor) -> Tensor:
    """The low word, zero where the parameter is infinite or NaN and the difference means nothing."""
    return torch.where(torch.isfinite(hi), low, torch.zeros_like(low))


class Float8Split8(WeightStorage):
    """A `Float8Weight`: an e4m3 code and an int8 low word, two bytes in place of bfloat16's two and a low word.

    The parameter has both, the state has neither. The rule sees twelve significant bits. An update is rounded to
    them stochastically: to nearest, weights would stand still at small learning rates, as weights of bfloat16 do.
    Eight random bits decide, as for `split4`. Words and scale are described in `_float8_weight`.
    """

    name = "fp8split8"
    dtypes = (torch.bfloat16,)
    rounded = False
    float8 = True
    random_bits = 8

    def codec(self, dtype: torch.dtype) -> Codec | None:
        return Codec(
            self.name, (Word("low", "int8"),), c="float8_weights.h", needs_random=True, pairs=True, scaled=True
        )

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert isinstance(p, Float8Weight)
        return from_words(p.codes, p.low, p.scale)

    def add(self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Noise) -> Written:
        assert isinstance(p, Float8Weight)
        scale = next_scale(p.largest.to(torch.int32), p.scale)
        codes, lo = to_words(weight + delta, scale, bitwise_left_shift(noise().to(torch.int32), 4) + 8)
        return Float8Weight(codes, scale, lo), None


_STORAGES = {
    storage.name: storage
    for storage in (
        WeightStorage(), Kahan(), Expansion(), Split(), Split8(), Split4(), Stochastic(), Master(), Float8Split8()
    )
}  # fmt: skip

# What "auto" means: nothing of an update is lost, for the fewest bytes. float32 has nothing to make up for.
_AUTO = {torch.float32: "plain", torch.bfloat16: "split8", torch.float16: "kahan"}


def weight_storages() -> tuple[str, ...]:
    """The names of all weight storages."""
    return tuple(_STORAGES)


def automatic_weights(dtype: torch.dtype, strict: bool) -> str:
    """The name of the weight storage that ``weights="auto"`` is for a parameter dtype.

    Strict arithmetic rounds every operation to a float format, which integers beside bfloat16 are not: it has
    expansions there.
    """
    return "expansion" if strict and dtype == torch.bfloat16 else _AUTO.get(dtype, "plain")


def weight_storage(name: str) -> WeightStorage:
    """A weight storage by name.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    check_choice("weights", name, weight_storages())
    return _STORAGES[name]
