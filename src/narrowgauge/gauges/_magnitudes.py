"""How large the numbers of a tensor are, and what narrower formats would make of them.

In a well initialized network features have about the same magnitude in every block. Where residual branches add up,
E|x_k| grows with depth, and in eight bits the few large features leave few codes to the many small ones: in the
paper float8 training diverges there, and does not with a layer scale that starts at zero. Gradients lose at the
other end: what is below the format's smallest number becomes zero. So a tensor is measured by its E|x| and absmax,
by the number of elements that are not finite, and by the share that a format would lose at each end
(`narrowgauge.gauges.Target`).

Everything but absmax is stored as sums, so that tensors, steps and ranks can be added. Nothing is copied from the
device before a property is read.

Source: Wortsman et al. 2023, Figures 2 and 11 (feature magnitudes, gradients), Appendix G (inf and NaN by tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges._formats import Target, targets
from narrowgauge.kernels._triton import unavailable

FORMATS = ("fp16", "bf16", "e4m3", "e5m2", "int8")
_SUMS = 5
_COUNTS = 4
_PIECE = 2**14
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class FormatLoss:
    """What a format would lose of a tensor, as shares of its finite nonzero elements. NaN if it has none.

    Attributes:
        underflow: share that rounds to zero.
        subnormal: share that rounds to a number below the normal ones, zeros apart.
        saturation: share that rounds to the largest number or beyond.
        overflow: share that rounds beyond the largest number.
    """

    underflow: float
    subnormal: float
    saturation: float
    overflow: float


@dataclass(frozen=True, eq=False)
class FeatureStats:
    """Magnitudes of one tensor, or of many.

    Attributes:
        sums: float64 tensor (5 + 4 formats,): numbers of all, of non-finite, and of finite nonzero elements; the
            sums of |x| and of x over the finite ones; then for each format how many of the finite ones do not
            underflow, are normal, saturate, overflow.
        absmax: 0-d float64 tensor, the largest finite |x|, 0 if there is none.
        formats: names of the formats.
    """

    sums: Tensor
    absmax: Tensor
    formats: tuple[str, ...]

    @classmethod
    def total(cls, stats: Sequence[FeatureStats]) -> FeatureStats:
        """The sum over several tensors or steps. A scaled format has one scale for each.

        Raises:
            ValueError: for an empty list, or statistics of different formats.
        """
        if not stats:
            raise ValueError("stats must not be empty")
        formats, device = stats[0].formats, stats[0].sums.device
        for other in stats:
            if other.formats != formats:
                raise ValueError(f"stats must have the same formats, got {formats} and {other.formats}")
        sums = torch.stack([s.sums.to(device) for s in stats]).sum(dim=0)
        return cls(sums, torch.stack([s.absmax.to(device) for s in stats]).amax(), formats)

    @cached_property
    def _read(self) -> list[float]:
        """Absmax and sums: one copy from the device."""
        values: list[float] = torch.cat([self.absmax[None], self.sums]).tolist()
        return values

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(self._read[1])

    @property
    def nonfinite(self) -> int:
        """Number of infinite and NaN elements."""
        return int(self._read[2])

    @property
    def nonzero(self) -> int:
        """Number of finite nonzero elements."""
        return int(self._read[3])

    @property
    def peak(self) -> float:
        """The largest finite |x|."""
        return self._read[0]

    @property
    def mean_magnitude(self) -> float:
        """E|x| over the finite elements: the paper's feature magnitude. NaN if there are none."""
        return self._per_finite(self._read[4])

    @property
    def mean(self) -> float:
        """Mean of the finite elements, NaN if there are none."""
        return self._per_finite(self._read[5])

    @property
    def losses(self) -> dict[str, FormatLoss]:
        """What each format would lose, by its name."""
        return {name: self._loss(index) for index, name in enumerate(self.formats)}

    def _per_finite(self, total: float) -> float:
        finite = self.elements - self.nonfinite
        return total / finite if finite else math.nan

    def _loss(self, index: int) -> FormatLoss:
        start = 1 + _SUMS + _COUNTS * index
        kept, normal, saturated, beyond = self._read[start : start + _COUNTS]
        whole = self.nonzero
        counts = (whole - kept, kept - normal, saturated, beyond)
        return FormatLoss(*(count / whole if whole else math.nan for count in counts))


def feature_stats(x: Tensor, formats: Sequence[str | Target] = FORMATS) -> FeatureStats:
    """Measure the magnitudes of a tensor: a feature, a gradient, a weight.

    Args:
        x: tensor of any float dtype and shape. Float64 is compared as it is, all others in float32; a scaled
            format compares the float32 product with the factor, as our linear layers do.
        formats: ``"fp16"``, ``"bf16"``, ``"e4m3"``, ``"e5m2"`` as they are; ``"e4m3 scaled"``, ``"e5m2 scaled"``,
            ``"int8"`` with one scale for the tensor by its absmax; or `Target` values.

    Returns:
        The sums, on the tensor's device, without waiting for it. Counts are exact up to 2^53. Triton kernels read
        the tensor once, and once more for formats; elsewhere eager torch reads it often.

    Raises:
        ValueError: if `x` is no float tensor, or for an unknown format.

    Source: Wortsman et al. 2023, Figure 2 (E|x_k|) and Equation 1; the format's own rounding.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    asked = targets(formats)
    x = x.detach().reshape(-1)
    names = tuple(target.name for target in asked)
    sums, largest = _by_kernels(x.contiguous(), asked) if kernels_take([x]) else _in_torch(x, asked)
    return FeatureStats(sums, largest, names)


def kernels_take(vectors: Sequence[Tensor]) -> bool:
    """Whether there are kernels for vectors of one device."""
    fit = all(x.dtype in _KERNEL_DTYPES and x.is_contiguous() for x in vectors)
    return fit and any(x.numel() for x in vectors) and unavailable(vectors[0].device) is None


def kernel_formats(asked: Sequence[Target], absmax: Tensor) -> tuple[Any, list[Tensor | None]]:
    """Arguments of kernels: boundaries of formats, and factors by the absmax of the vectors."""
    bounds = tuple(target.boundaries_in(torch.float32) for target in asked)
    single = absmax.to(torch.float32)
    return bounds, [target.factor(single) if target.scaled else None for target in asked]


def _by_kernels(x: Tensor, asked: Sequence[Target]) -> tuple[Tensor, Tensor]:
    """The same as `_in_torch`, by kernels."""
    from narrowgauge.kernels import _magnitudes  # here: importing it imports triton

    found = _magnitudes.measure([x])
    bounds, factors = kernel_formats(asked, found[:, 0])
    counts = _magnitudes.count([x], [(1, 0)], bounds, factors)
    return torch.cat([torch.full_like(found[0, :1], x.numel()), found[0, 1:], counts[0, 1:]]), found[0, 0]


def _in_torch(x: Tensor, asked: Sequence[Target]) -> tuple[Tensor, Tensor]:
    """The specification of `narrowgauge.kernels._magnitudes`: the sums of a vector, and its absmax."""
    # On a CPU in pieces that stay in its cache and in one thread: five times as fast (140 ms in place of 665 for
    # 3.1 million elements and five formats, on two busy cores).
    pieces = torch.split(x, _PIECE) if x.device.type == "cpu" else (x,)
    found = torch.stack([vector_magnitudes(piece) for piece in pieces])
    absmax = found[:, 0].amax()
    sums = [found[:, 1:].sum(0)]
    if asked:
        single = absmax.to(torch.float32)
        counts = [
            torch.stack([hit.count_nonzero() for hit in reached(finite(p)[1], asked, lambda t: t.factor(single))])
            for p in pieces
        ]
        sums.append(torch.stack(counts).sum(0).to(torch.float64))
    return torch.cat(sums), absmax


def vector_magnitudes(x: Tensor) -> Tensor:
    """Absmax of one vector, then the first five of `FeatureStats.sums`: float64 (6,)."""
    x, size = finite(x)
    values = [
        size.max() if x.numel() else size.sum(),
        torch.full((), x.numel(), device=x.device),
        x.isnan().sum(),
        size.count_nonzero(),
        size.sum(dtype=torch.float64),
        x.nan_to_num(0.0).sum(dtype=torch.float64),
    ]
    return torch.stack([value.to(torch.float64) for value in values])


def finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in float32, or float64, with NaN for what is not finite; and its magnitude, with zeros there."""
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    size = x.abs()
    inside = size < torch.inf
    return torch.where(inside, x, torch.nan), torch.where(inside, size, 0.0)


def reached(size: Tensor, asked: Sequence[Target], factor: Callable[[Target], Tensor]) -> Iterator[Tensor]:
    """For each format and each of its four boundaries which magnitudes have reached it.

    Args:
        size: finite magnitudes.
        asked: the formats.
        factor: what a scaled format multiplies them by, in float32.
    """
    for target in asked:
        scaled = size.to(torch.float32) * factor(target) if target.scaled else size
        yield from (scaled >= boundary for boundary in target.boundaries_in(scaled.dtype))
