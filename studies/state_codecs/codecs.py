"""Ways to keep a moment in a byte or less: what is read back of what was written, for a bench.

A codec here is a function of a float32 matrix, a row a block, and of uniform noise of its shape; it gives what a
decoder would read. No codes are kept: a bench needs the error only, and one line a codec makes many comparable.
Two kinds are enough:

- a `Map` has fixed levels in [0, 1] and a scale a block, its largest magnitude. Linear, power, dynamic, companded
  and logarithmic maps, on the moment or on its root, are lists of levels, and of the cuts between them;
- an adaptive codec fits its levels to each block, and keeps two numbers of it.

**Logarithm without a logarithm.** A positive float32's bit pattern, read as an integer, is a logarithm, piecewise
linear: the exponent is its integer part, the fraction the rest, and 2^23 make a binade. It is at most 0.0861
binades off and monotone, so equal steps of the pattern are steps of equal ratio to within a factor of two. Encode
and decode are integer arithmetic and one multiplication: every device gives the same codes, without a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.formats import codebook
from narrowgauge.storage import StateContext, state_storage

Codec = Callable[[Tensor, Tensor], Tensor]

_TINY = 2.0**-126  # the smallest normal float32: a block or an element below is kept as zero
_HUGE = 2.0**126
_EXPONENT = 0x7F800000
_KEY = 15  # bits dropped from a pattern to look a level up: what remains tells 2^-8 of a binade apart
_ONE = 0x3F800000  # the pattern of 1.0
BINADE = 1 << 23  # steps of the bit pattern from a power of two to the next


@dataclass(frozen=True, eq=False)
class Map:
    """Fixed levels for magnitudes over the block's largest; signs are kept, and zero is exact.

    Attributes:
        levels: ascending float32 values, the first 0, the last 1.
        cuts: where the nearest level changes, one fewer; between two levels, not always in their middle.
        stochastic: instead of the nearest level, one of the two around, so that the mean is right.
        floor: what is not zero never becomes zero, but the least level.
        half_scales: scales are kept as float16 (1), or their roots are (2).
    """

    levels: Tensor
    cuts: Tensor
    stochastic: bool = False
    floor: bool = False
    half_scales: int = 0

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        magnitude = x.abs()
        scale = magnitude.amax(1, keepdim=True)
        y = (magnitude / scale.clamp_min(_TINY)).clamp_max(1.0)
        levels, cuts, first = self._tables(x.device)
        # A key covers so little that at most one level lies inside: the level below is found or the one before it.
        low = _look_up(first, y.view(torch.int32) >> _KEY)
        low = low + (y >= _look_up(levels, low + 1))
        if self.stochastic:
            below = _look_up(levels, low)
            code = low + (noise * (_look_up(levels, low + 1) - below) < y - below)
        else:
            code = low + (y > _look_up(cuts, low))
        if self.floor:
            code = torch.maximum(code, (magnitude >= _TINY).to(torch.int32))
        if self.half_scales:
            scale = scale.half().float() if self.half_scales == 1 else scale.sqrt().half().float().square()
        return (_look_up(levels, code) * scale).copysign(x)

    def by_value(self) -> Map:
        """The same levels, with cuts in the middle between them: the nearest level by value."""
        return replace(self, cuts=(self.levels[1:] + self.levels[:-1]) / 2)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return _tables_of(self, device)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    # Several times faster than table[index] on a CPU.
    return table.index_select(0, index.reshape(-1)).view(index.shape)


@functools.lru_cache(maxsize=256)
def _tables_of(map_: Map, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Levels and cuts, both with an infinity at the end, and the level at or below the start of each key."""
    infinity = torch.tensor([torch.inf])
    starts = (torch.arange(0, (_ONE >> _KEY) + 1, dtype=torch.int32) << _KEY).view(torch.float32)
    first = torch.searchsorted(map_.levels, starts, right=True, out_int32=True) - 1
    assert int((first[1:] - first[:-1]).max()) <= 1, "two levels within one key"
    levels, cuts = torch.cat([map_.levels, infinity]), torch.cat([map_.cuts, infinity])
    return levels.to(device), cuts.to(device), first.to(device)


def formula(value: Callable[[Tensor], Tensor], count: int, **options: int) -> Map:
    """A map whose k-th of count + 1 levels is value(k / count), rounded to the nearest k."""
    k = torch.arange(count + 1, dtype=torch.float64)
    return Map(value(k / count).float(), value((k[:-1] + 0.5) / count).float(), **options)


def power(p: float, count: int, **options: int) -> Map:
    """Levels (k / count)^p: 1 is linear, and 2, for a second moment, linear on its root."""
    return formula(lambda y: y**p, count, **options)


def softsign(count: int, **options: int) -> Map:
    """FlashOptim's companding: y = 2x / (1 + x) is kept linearly."""
    return formula(lambda y: y / (2 - y), count, **options)


def listed(values: Sequence[float]) -> Map:
    """Ascending values from 0, over the last."""
    levels = torch.tensor(values, dtype=torch.float64) / values[-1]
    return Map(levels.float(), ((levels[1:] + levels[:-1]) / 2).float())


def decades(range_: float, count: int, **options: int) -> Map:
    """Zero, and count levels of equal ratio over so many decades."""
    k = torch.arange(count, dtype=torch.float64)
    levels = 10 ** (range_ * (k / (count - 1) - 1))
    cuts = torch.cat([levels[:1] / 2, (levels[1:] * levels[:-1]).sqrt()])
    return Map(torch.cat([torch.zeros(1, dtype=torch.float64), levels]).float(), cuts.float(), **options)


def book(name: str, signed: bool, bits: int = 8, root: bool = False, **options: int) -> Map:
    """The non-negative values of a codebook; with `root` they are for the root, and their squares the levels."""
    values = codebook(name, signed, bits).double()
    values = values[values >= 0]
    cuts = (values[1:] + values[:-1]) / 2
    return Map(*((x.square() if root else x).float() for x in (values, cuts)), **options)


def exact(x: Tensor, noise: Tensor) -> Tensor:
    """All of it, in float32."""
    return x


def nothing(x: Tensor, noise: Tensor) -> Tensor:
    """None of it."""
    return torch.zeros_like(x)


def _pattern(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _extremes(magnitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which elements are not zero, and the smallest and the largest of them, each (blocks, 1)."""
    kept = magnitude >= _TINY
    largest = magnitude.amax(1, keepdim=True).clamp_min(_TINY)
    smallest = (magnitude + ~kept * _HUGE).amin(1, keepdim=True)
    return kept, torch.minimum(smallest, largest), largest


def _round(place: Tensor, noise: Tensor, rounding: str) -> Tensor:
    if rounding == "nearest":
        return place.round()
    return place.floor() if rounding == "down" else (place + noise).floor()


@dataclass(frozen=True)
class Stored:
    """The library's own storage of a moment by itself, written and read back."""

    states: str
    signed: bool
    rounding: str = "nearest"

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        random = (noise * 2.0**16).to(torch.int32) if self.rounding == "stochastic" else None
        storage = state_storage(self.states).for_slot(self.signed, has_normalizer=False)
        context = StateContext(x.shape, self.signed, x.shape[1])
        return storage.decode(storage.encode(x, context, random), context)


@dataclass(frozen=True)
class Relative:
    """The library's codes of a first moment that has been divided by its unit."""

    bits: int

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        storage = state_storage(f"log{self.bits}").for_slot(signed=True, has_normalizer=True)
        context = StateContext(x.shape, True, x.shape[1])
        return storage.decode(storage.encode(x, context), context)


@dataclass(frozen=True)
class Pattern:
    """A second moment as the library's `log8` and `log4` have it, from the definition and not from their code.

    Code 0 is zero and stays zero; the others are never zero: what lies too far below the largest is raised to a
    floor. That can only make a step too small, where rounding to zero makes it explode.

    Attributes:
        bits: of a code.
        steps: which steps a block may have: "powers" of two, on a grid that stays where it is (`log8`); "whole"
            patterns, from the least element itself (`log4`); or "128ths" of a power, from close below it.
        rounding: "nearest" or "stochastic".
    """

    bits: int = 8
    steps: str = "powers"
    rounding: str = "nearest"

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        kept, smallest, largest = _extremes(x)
        hi = _pattern(largest)
        lo = torch.maximum(_pattern(smallest), hi - (63 if self.bits == 8 else 48) * BINADE)
        base, step = self._range(lo, hi)
        if self.rounding == "nearest":
            more = step // 2
        else:
            more = ((noise * 2.0**16).long() * step >> 16).int()
        value = base + (torch.maximum(_pattern(x), lo) - base + more) // step * step
        return value.view(torch.float32) * kept

    def _range(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """Where the codes of a block begin, and how wide a step is."""
        most = 2**self.bits - 2
        if self.steps == "whole":
            return lo, ((hi - lo + most - 1) // most).clamp_min(1)
        if self.steps == "128ths":
            base = lo // 4096 * 4096
            least = ((hi - base + most - 1) // most).clamp_min(4096)
            part = 1 << ((_pattern(least.float()) >> 23) - 127 - 7)
            return base, (least + part - 1) // part * part
        # Each takes more steps than the next: the first that is few enough is looked for.
        base, step = torch.full_like(lo, BINADE), torch.full_like(lo, 1 << 27)
        for each in reversed([1 << s for s in range(12, 27)]):
            begin = (lo // each * each).clamp_min(BINADE)
            enough = (hi - begin + each - 1) // each <= most
            base, step = torch.where(enough, begin, base), torch.where(enough, each, step)
        return base, step


@dataclass(frozen=True)
class Log:
    """A second moment in equal steps of its bit pattern between two exact ends, the block's smallest and largest.

    Finer than the library's in 8 bits by up to twice, in more instructions and two numbers a block.
    """

    codes: int
    rounding: str = "nearest"
    binades: int = 48

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        kept, smallest, largest = _extremes(x)
        high = _pattern(largest)
        low = torch.maximum(_pattern(smallest), high - self.binades * BINADE)
        unit = ((high - low).float() / (self.codes - 1)).clamp_min(1.0)
        code = _round((_pattern(x) - low).float() / unit, noise, self.rounding).clamp(0, self.codes - 1)
        value = (low + (code * unit).round().to(torch.int32)).view(torch.float32)
        return value * kept


@dataclass(frozen=True)
class LinLog:
    """A first moment as the library's `log8` has it where there is no second, with other knees and roundings.

    Linear near zero and logarithmic further out: equal steps of the pattern of |m| + c. c is a power of two, `knee`
    times the block's smallest non-zero magnitude or the next below, at least `binades` binades under its largest.
    """

    codes: int = 127
    rounding: str = "nearest"
    knee: float = 8.0
    binades: int = 24

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        magnitude = x.abs()
        kept, smallest, largest = _extremes(magnitude)
        c = torch.maximum(smallest * self.knee, largest * 2.0**-self.binades)
        c = (_pattern(torch.minimum(c, largest * 2)) & _EXPONENT).view(torch.float32)
        low, high = _pattern(c), _pattern(largest + c)
        unit = ((high - low).float() / self.codes).clamp_min(1.0)
        code = _round((_pattern(magnitude + c) - low).float() / unit, noise, self.rounding).clamp(0, self.codes)
        value = (low + (code * unit).round().to(torch.int32)).view(torch.float32) - c
        value = torch.maximum(value, largest * (code == self.codes))  # exact, in spite of the sum's rounding
        return (value * kept).copysign(x)


@dataclass(frozen=True)
class TrueLog:
    """Levels of equal ratio between the block's smallest and largest magnitude, by log2 and exp2."""

    codes: int
    rounding: str = "nearest"

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        magnitude = x.abs()
        kept, smallest, largest = _extremes(magnitude)
        low, high = smallest.log2(), largest.log2()
        unit = ((high - low) / (self.codes - 1)).clamp_min(2.0**-20)
        code = _round((magnitude.clamp_min(_TINY).log2() - low) / unit, noise, self.rounding)
        value = torch.exp2(low + code.clamp(0, self.codes - 1) * unit)
        return (value * kept).copysign(x)


def float8(x: Tensor, noise: Tensor) -> Tensor:
    """Float8 e4m3 with a scale a block, as the library's `fp8`."""
    scale = x.abs().amax(1, keepdim=True).clamp_min(_TINY * 512) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def float8_expanded(x: Tensor, noise: Tensor) -> Tensor:
    """COAT's dynamic range expansion: x^k in e4m3, k such that the block's range fills the format's."""
    magnitude = x.abs()
    kept, smallest, largest = _extremes(magnitude)
    # From the smallest subnormal, 2^-9, to the largest number.
    k = torch.log(torch.tensor(448 * 2.0**9)) / torch.log((largest / smallest).clamp_min(1 + 2.0**-20))
    y = (magnitude / largest).clamp_max(1.0) ** k * 448
    value = (y.to(torch.float8_e4m3fn).float() / 448) ** (1 / k) * largest
    return (value * kept).copysign(x)
