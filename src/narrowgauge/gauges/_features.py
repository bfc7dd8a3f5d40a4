"""How large the numbers of a tensor are, and what narrower formats would make of them.

A network that is initialised well has features of about the same magnitude in every block. Where residual
branches add up, E|x_k| grows with depth instead, and the few large features take the codes from the many small
ones once the tensor is in eight bits: in the paper float8 training diverges there, and does not with a layer
scale that starts at zero. Of gradients it is the other end that matters: what is below the smallest number of
the format is no gradient any more. So a tensor is measured by its E|x| and absmax, by how many elements are no
finite numbers, and by the share that a format would lose at each end (`narrowgauge.gauges.Target` says what
that means).

Everything is kept as sums, but for absmax, so that tensors, steps and ranks can be added. Nothing is read from
the device before somebody asks for a property.

Source: Wortsman et al. 2023, Figures 2 and 11 (feature magnitudes, gradients), Appendix G (inf and NaN by
tensor).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """What a format would make of a tensor, in shares of its finite elements other than zero. NaN if it has
    none.

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
        sums: float64 tensor (5 + 4 formats,): how many elements; how many are not finite; how many are finite
            and not zero; the sums of |x| and of x over the finite ones; then for each format how many of the
            finite ones do not underflow, are normal, saturate, overflow.
        absmax: 0-d float64 tensor, the largest finite |x|, 0 if there is none. Of several the largest counts.
        formats: names of the formats.
    """

    sums: Tensor
    absmax: Tensor
    formats: tuple[str, ...]

    @classmethod
    def total(cls, stats: Sequence[FeatureStats]) -> FeatureStats:
        """Several tensors or steps taken together.

        What a scaled format loses of each is by the scale of each.

        Raises:
            ValueError: for an empty list, or statistics of different formats.
        """
        if not stats:
            raise ValueError("stats: got an empty list, takes at least one")
        formats, device = stats[0].formats, stats[0].sums.device
        for other in stats:
            if other.formats != formats:
                raise ValueError(f"stats: got formats {other.formats} beside {formats}, takes the same for all")
        sums = torch.stack([s.sums.to(device) for s in stats]).sum(dim=0)
        return cls(sums, torch.stack([s.absmax.to(device) for s in stats]).amax(), formats)

    @cached_property
    def _read(self) -> list[float]:
        """Absmax and sums: one copy from the device."""
        values: list[float] = torch.cat([self.absmax[None], self.sums]).tolist()
        return values

    @property
    def elements(self) -> int:
        """How many elements there are."""
        return int(self._read[1])

    @property
    def nonfinite(self) -> int:
        """How many of them are infinite or NaN."""
        return int(self._read[2])

    @property
    def nonzero(self) -> int:
        """How many are finite and not zero."""
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
        return {name: self._loss(place) for place, name in enumerate(self.formats)}

    def as_record(self) -> dict[str, Any]:
        """The values of a record, by the names that records have.

        ``absmax``; ``mean``, which is that of |x|; ``nonfinite``; ``elements``; and ``formats``, by name the
        shares of `FormatLoss`.
        """
        return {
            "elements": self.elements,
            "nonfinite": self.nonfinite,
            "absmax": self.peak,
            "mean": self.mean_magnitude,
            "formats": {name: vars(loss) for name, loss in self.losses.items()},
        }

    def _per_finite(self, total: float) -> float:
        finite = self.elements - self.nonfinite
        return total / finite if finite else math.nan

    def _loss(self, place: int) -> FormatLoss:
        start = 1 + _SUMS + _COUNTS * place
        kept, normal, saturated, beyond = self._read[start : start + _COUNTS]
        whole = self.nonzero
        counts = (whole - kept, kept - normal, saturated, beyond)
        return FormatLoss(*(count / whole if whole else math.nan for count in counts))


def feature_stats(x: Tensor, formats: Sequence[str | Target] = FORMATS) -> FeatureStats:
    """Measure the magnitudes of a tensor: a feature, a gradient, a weight.

    Args:
        x: tensor of any float dtype and shape. Float64 is compared as it is, all others in float32; a scaled
            format takes its float32 product with the factor, as our linear layers do.
        formats: which formats to ask about: names of ``"fp16"``, ``"bf16"``, ``"e4m3"``, ``"e5m2"`` as they
            are, ``"e4m3 scaled"``, ``"e5m2 scaled"``, ``"int8"`` with one scale for the tensor by its absmax;
            or `Target` values of one's own.

    Returns:
        The sums, on the tensor's device; nothing is waited for. Counts are exact up to 2^53. Where Triton runs, a
        kernels read the tensor once, and once more for formats; elsewhere eager torch reads it often.

    Raises:
        ValueError: for what is no tensor of floats, or an unknown format.

    Source: Wortsman et al. 2023, Figure 2 (E|x_k|) and Equation 1; the format's own rounding.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x: got {getattr(x, 'dtype', type(x).__name__)}, takes a tensor of floats")
    asked = targets(formats)
    x = x.detach().reshape(-1)
    names = tuple(target.name for target in asked)
    if kernels_take([x]):
        sums, largest = _by_kernels(x.contiguous(), asked)
    else:
        sums, largest = _measure(x, asked)
    return FeatureStats(sums, largest.to(torch.float64), names)


def kernels_take(vectors: Sequence[Tensor]) -> bool:
    """Whether there are kernels for some tensors of one device."""
    fit = all(x.dtype in _KERNEL_DTYPES and x.is_contiguous() for x in vectors)
    return fit and any(x.numel() for x in vectors) and unavailable(vectors[0].device) is None


def kernel_formats(asked: Sequence[Target], absmax: Tensor) -> tuple[Any, list[Tensor | None]]:
    """What kernels are told of formats: boundaries, and factors by the absmax of the vectors."""
    bounds = tuple(target.boundaries_in(torch.float32) for target in asked)
    single = absmax.to(torch.float32)
    return bounds, [target.factor(single) if target.scaled else None for target in asked]


def _by_kernels(x: Tensor, asked: Sequence[Target]) -> tuple[Tensor, Tensor]:
    """The same as `_measure`, by kernels."""
    from narrowgauge.kernels import _magnitudes  # here and not above: `import narrowgauge` brings no triton

    looked = _magnitudes.look([x])
    bounds, factors = kernel_formats(asked, looked[:, 0])
    counts = _magnitudes.count([x], [(1, 0)], bounds, factors)
    sums = torch.cat([torch.full_like(looked[0, :1], x.numel()), looked[0, 1:], counts[0, 1:]])
    return sums, looked[0, 0]


def _measure(x: Tensor, asked: Sequence[Target]) -> tuple[Tensor, Tensor]:
    """The specification of `narrowgauge.kernels._magnitudes`: sums and counts, and the largest finite magnitude."""
    # A CPU takes pieces that stay in its cache and that torch does not share out to threads: five times as fast
    # (140 ms for 3.1 million elements and five formats, not 665, on two busy cores).
    pieces = torch.split(x, _PIECE) if x.device.type == "cpu" else (x,)
    # A zero in front: a tensor without elements has an absmax too.
    zero = _finite(x[:0]).new_zeros(1)
    largest = torch.stack([torch.cat([zero, _finite(piece).abs()]).amax() for piece in pieces]).amax()
    return torch.stack([_sums(piece, asked, largest) for piece in pieces]).sum(dim=0), largest


def _finite(x: Tensor) -> Tensor:
    """The elements in which they are compared, with zeros for those that are not finite."""
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    return torch.where(x.abs() < torch.inf, x, 0.0)


def _sums(x: Tensor, asked: Sequence[Target], largest: Tensor) -> Tensor:
    """Sums and counts of a tensor: float64 (5 + 4 formats,)."""
    finite = _finite(x)
    magnitude = finite.abs()
    sums = [
        torch.full_like(largest, x.numel(), dtype=torch.float64),
        x.numel() - (x.to(finite.dtype).abs() < torch.inf).count_nonzero(),
        magnitude.count_nonzero(),
        magnitude.sum(dtype=torch.float64),
        finite.sum(dtype=torch.float64),
    ]
    for target in asked:
        scaled = magnitude
        if target.scaled:
            scaled = magnitude.to(torch.float32) * target.factor(largest.to(torch.float32))
        sums += [(scaled >= boundary).count_nonzero() for boundary in target.boundaries_in(scaled.dtype)]
    return torch.stack([value.to(torch.float64) for value in sums])
