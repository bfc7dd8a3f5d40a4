"""What if this tensor were e4m3? The magnitudes at which a number format loses numbers.

A format rounds to the nearest of its numbers, ties to the even code. So what becomes of a magnitude depends
only on which of four boundaries it has reached, each halfway between two neighbouring codes:

    0 ──────── underflows ─┤ subnormal ├─ normal ─────────────────────┤ saturates ├─ overflows ──▶
               halfway to    halfway from the last      halfway to the    halfway from the largest
               the smallest  subnormal to the normals   largest           to what would be next

- **Underflow**: not zero, but rounds to zero.
- **Subnormal**: rounds to a number with fewer significant bits than the format promises, and not to zero.
- **Saturation**: rounds to the largest finite number, or beyond it.
- **Overflow**: rounds beyond the largest finite number: to infinity in fp16, bf16 and e5m2; in e4m3 and int8,
  which have none, it is cut to the largest number.

Whether a boundary itself belongs below or above is decided by the tie: upwards if the upper code is even. What
would come after the largest number is counted as if the format went on: 480 after e4m3's 448.

A *scaled* target divides first: the tensor's absmax is laid on the format's largest number, as our linear
layers do with one scale for a tensor. Nothing overflows then, and what a single large element costs the small
ones is seen as underflow.

Source: the formats as `narrowgauge.formats` has them; Wortsman et al. 2023, Equation 1 (scaling by absmax).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat

# Below this absmax a scaled tensor is zeros: scale and inverse must stay normal numbers of float32.
SMALLEST_ABSMAX = 2.0**-110


@dataclass(frozen=True)
class Target:
    """A number format that a tensor could be kept in.

    Attributes:
        name: what it is called in records.
        floats: the float format; None for int8, symmetric, -127 to 127.
        scaled: whether the tensor's absmax is laid on the largest number first. Int8 always is.
    """

    name: str
    floats: FloatFormat | None = None
    scaled: bool = True

    def __post_init__(self) -> None:
        if self.floats is None and not self.scaled:
            raise ValueError("scaled: got False, takes True for int8: without a scale it holds whole numbers only")

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return 127.0 if self.floats is None else self.floats.max

    @property
    def boundaries(self) -> tuple[float, float, float, float]:
        """The smallest float64 magnitudes that do not underflow, are normal, saturate, overflow: rising."""
        if self.floats is None:
            # Int8 has no subnormals: 1 is as normal as 127.
            return (_after(0.5, 1), _after(0.5, 1), _after(126.5, 127), _after(127.5, 128))
        fmt = self.floats
        smallest_normal = fmt.encode(fmt.min_normal)
        halfway = (
            (fmt.min_subnormal / 2, 1),
            (fmt.min_normal - fmt.min_subnormal / 2, smallest_normal),
            (fmt.max - fmt.ulp(fmt.max) / 2, fmt.max_code),
            (fmt.max + fmt.ulp(fmt.max) / 2, fmt.max_code + 1),
        )
        below, normal, saturated, beyond = (_after(middle, code) for middle, code in halfway)
        return below, max(below, normal), saturated, beyond

    def boundaries_in(self, dtype: torch.dtype) -> tuple[float, float, float, float]:
        """The same as the smallest magnitudes of a dtype: float32 or float64."""
        return _boundaries_in(self, dtype)

    def factor(self, absmax: Tensor) -> Tensor:
        """What a scaled target multiplies a tensor by: float32, 0-d, from the absmax of its finite elements."""
        # A tensor, because torch divides a number by a tensor in two roundings.
        largest = torch.full_like(absmax, self.largest)
        return torch.where(absmax >= SMALLEST_ABSMAX, largest / absmax, 0.0)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("fp16", FP16, scaled=False),
        Target("bf16", BF16, scaled=False),
        Target("e4m3", FP8_E4M3, scaled=False),
        Target("e5m2", FP8_E5M2, scaled=False),
        Target("e4m3 scaled", FP8_E4M3),
        Target("e5m2 scaled", FP8_E5M2),
        Target("int8"),
    )
}


def targets(formats: Sequence[str | Target]) -> tuple[Target, ...]:
    """Targets of names, or of values of one's own.

    Raises:
        ValueError: for an unknown name, or one that is given twice.
    """
    if isinstance(formats, str):
        raise ValueError(f"formats: got {formats!r}, takes a list such as [{formats!r}]")
    chosen = []
    for name in formats:
        if isinstance(name, Target):
            chosen.append(name)
        elif name in TARGETS:
            chosen.append(TARGETS[name])
        else:
            raise ValueError(f"formats: got {name!r}, takes a Target or one of {', '.join(map(repr, TARGETS))}")
    names = [target.name for target in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"formats: got {name!r} twice, takes each name once")
    return tuple(chosen)


@functools.cache
def _boundaries_in(target: Target, dtype: torch.dtype) -> tuple[float, float, float, float]:
    if dtype == torch.float64:
        return target.boundaries
    below, normal, saturated, beyond = map(_up_to_float32, target.boundaries)
    return below, normal, saturated, beyond


def _after(halfway: float, upper_code: int) -> float:
    """The smallest float64 that rounds to the upper of two neighbours or beyond: ties go to the even code."""
    return halfway if upper_code % 2 == 0 else math.nextafter(halfway, math.inf)


def _up_to_float32(x: float) -> float:
    """The smallest float32 that is not below x."""
    near = torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32)
    up = torch.nextafter(near, torch.tensor(math.inf))
    return float(near) if float(near) >= x else float(up)
