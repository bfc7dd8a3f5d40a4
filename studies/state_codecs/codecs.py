"""Ways to keep a moment in a byte or less: what is read back of what was written, for the bench.

A codec here is a function of a float32 matrix, a row a block, and of uniform noise of its shape; it gives what a
decoder would read. No codes are kept: a bench needs the error only. Other work's codecs are written down from its
papers and code; `Stored` and `Relative` are this library's own storages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import codebook
from narrowgauge.storage import StateContext, state_storage

Codec = Callable[[Tensor, Tensor], Tensor]

_TINY = 2.0**-126  # the smallest normal float32: a block or an element below is kept as zero


@dataclass(frozen=True, eq=False)
class Map:
    """Fixed levels for magnitudes over the block's largest; signs are kept, and zero is exact."""

    levels: Tensor  # ascending float32 values, the first 0, the last 1
    cuts: Tensor  # where the nearest level changes, one fewer
    floor: bool = False  # what is not zero never becomes zero, but the least level
    half_scales: int = 0  # scales are kept as float16 (1), or their roots are (2)

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        magnitude = x.abs()
        scale = magnitude.amax(1, keepdim=True)
        y = (magnitude / scale.clamp_min(_TINY)).clamp_max(1.0)
        code = torch.bucketize(y, self.cuts.to(x.device))
        if self.floor:
            code = code.maximum((magnitude >= _TINY).long())
        if self.half_scales:
            scale = scale.half().float() if self.half_scales == 1 else scale.sqrt().half().float().square()
        return (self.levels.to(x.device)[code] * scale).copysign(x)


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


def book(name: str, signed: bool, bits: int = 8) -> Map:
    """The non-negative values of a codebook."""
    values = codebook(name, signed, bits).double()
    values = values[values >= 0]
    return Map(values.float(), ((values[1:] + values[:-1]) / 2).float())


def float8_expanded(x: Tensor, noise: Tensor) -> Tensor:
    """COAT's dynamic range expansion: x^k in e4m3, k such that the block's range fills the format's."""
    magnitude = x.abs()
    kept = magnitude >= _TINY
    largest = magnitude.amax(1, keepdim=True).clamp_min(_TINY)
    smallest = (magnitude + ~kept * 2.0**126).amin(1, keepdim=True).minimum(largest)
    # From the smallest subnormal, 2^-9, to the largest number.
    k = torch.log(torch.tensor(448 * 2.0**9)) / torch.log((largest / smallest).clamp_min(1 + 2.0**-20))
    y = (magnitude / largest).clamp_max(1.0) ** k * 448
    value = (y.to(torch.float8_e4m3fn).float() / 448) ** (1 / k) * largest
    return (value * kept).copysign(x)


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

    def beside(self, x: Tensor, written: Tensor) -> Tensor:
        """Codes of the scales that blocks have been written with already; what is larger is cut off."""
        top = written.abs().amax(1, keepdim=True)
        # A block's scale is its largest element's: that stands in one more column.
        return self(torch.cat([x.clamp(-top, top), top], dim=1), x)[:, :-1]
