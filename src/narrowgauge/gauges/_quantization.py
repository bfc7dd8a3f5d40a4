"""What quantizing Adam's moments costs: in the moments, and in the update made of them.

An error of a moment reaches the weights as an error of m / (√v + ε). Small values of v are dangerous: where v
rounds to zero, the update is divided by ε alone. A good pair of maps has its errors where few values are. With 256
codes a moment there are 256 × 256 updates that quantized moments can mean. For each of them this module counts how
often it is used, and how far it is from the exact update on average.

Everything is stored as sums, so that tensors, steps and ranks can be added.

Source: 8-bit Optimizers via Block-wise Quantization, Appendix D and Figures 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from narrowgauge._arguments import Positive, check
from narrowgauge.gauges._metrics import check_shape

CODES = 256


@runtime_checkable
class Coded(Protocol):
    """A tensor as codes: `narrowgauge.storage.Quantized`, or a moment of an optimizer."""

    @property
    def codes(self) -> Tensor:
        """Codes below 256, any integer dtype."""

    def dequantize(self) -> Tensor:
        """The numbers that they stand for, in their shape."""


@dataclass(frozen=True, eq=False)
class QuantizationError:
    """What quantizing lost of one tensor, or of many.

    Attributes:
        usage: float64 tensor (256,): how often each code is used.
        sums: float64 tensor (5,): of |x - q|, (x - q)², x²; how many x are not zero; how many of those became zero.
    """

    usage: Tensor
    sums: Tensor

    @classmethod
    def total(cls, errors: Sequence[QuantizationError]) -> QuantizationError:
        """The sums over several tensors.

        Raises:
            ValueError: for an empty list.
        """
        return cls(_total([e.usage for e in errors]), _total([e.sums for e in errors]))

    @property
    def mean_absolute(self) -> float:
        """Mean of |x - q| over the elements."""
        return _ratio(self.sums[0], self.usage.sum())

    @property
    def relative_norm(self) -> float:
        """‖x - q‖ / ‖x‖."""
        return math.sqrt(_ratio(self.sums[1], self.sums[2]))

    @property
    def flushed(self) -> float:
        """Share of the elements other than zero that became zero."""
        return _ratio(self.sums[4], self.sums[3])

    @property
    def entropy(self) -> float:
        """Bits of information in a code, at most 8: how evenly the codes are used."""
        share = self.usage / self.usage.sum()
        return float(-torch.xlogy(share, share).sum() / torch.log(share.new_tensor(2.0)))


def quantization_error(x: Tensor, quantized: Coded) -> QuantizationError:
    """Compare a tensor with its quantized self.

    Args:
        x: the exact tensor, any float dtype and shape, finite.
        quantized: what `narrowgauge.storage.quantize` made of it.

    Raises:
        ValueError: if the shapes differ.

    Source: 8-bit Optimizers via Block-wise Quantization, Table 6 (absolute error) and Appendix D (histograms).
    """
    check_shape("quantized", quantized.codes, x)
    usage = torch.bincount(_codes(quantized), minlength=CODES).to(torch.float64)
    exact, kept = _exact(x), _exact(quantized.dequantize())
    delta, nonzero = exact - kept, exact != 0
    terms = (delta.abs(), delta.square(), exact.square(), nonzero, nonzero & (kept == 0))
    return QuantizationError(usage, torch.stack([term.sum(dtype=torch.float64) for term in terms]))


@dataclass(frozen=True, eq=False)
class AdamErrorMap:
    """Errors of Adam's update by the codes of its moments.

    Attributes:
        cells: float64 tensor (4, 256, 256): for every code of m (rows) and of v (columns), how many updates it
            stands for, the sum of their |u - u8|, the sum of |u - u8| / |u| over those that are not zero, and how
            many those are. (4, 256, 1) where v is exact.
        sums: float64 tensor (2,): of (u - u8)² and of u².
    """

    cells: Tensor
    sums: Tensor

    @classmethod
    def total(cls, maps: Sequence[AdamErrorMap]) -> AdamErrorMap:
        """The sums over several tensors or steps.

        Raises:
            ValueError: for an empty list.
        """
        return cls(_total([m.cells for m in maps]), _total([m.sums for m in maps]))

    @property
    def usage(self) -> Tensor:
        """How many updates each cell stands for: float64 (256, 256)."""
        return self.cells[0]

    @property
    def absolute(self) -> Tensor:
        """Mean |u - u8| of each cell: float64 (256, 256), NaN where a cell is not used."""
        return self.cells[1] / self.cells[0]

    @property
    def relative(self) -> Tensor:
        """Mean |u - u8| / |u| of each cell: float64 (256, 256), NaN where no update other than zero falls."""
        return self.cells[2] / self.cells[3]

    @property
    def by_first_code(self) -> AdamErrorMap:
        """The same with the codes of v taken together: cells (4, 256, 1)."""
        return AdamErrorMap(self.cells.sum(dim=2, keepdim=True), self.sums)

    @property
    def mean_absolute(self) -> float:
        """Mean of |u - u8| over all updates: the paper's Adam error."""
        return _ratio(self.cells[1].sum(), self.cells[0].sum())

    @property
    def mean_relative(self) -> float:
        """Mean of |u - u8| / |u| over the updates other than zero. A single one near zero can dominate it."""
        return _ratio(self.cells[2].sum(), self.cells[3].sum())

    @property
    def relative_norm(self) -> float:
        """‖u - u8‖ / ‖u‖ over all updates."""
        return math.sqrt(_ratio(self.sums[0], self.sums[1]))

    def overlap(self, worst: float = 0.05) -> float:
        """Share of the updates that fall into the worst cells: high where high use and high error coincide.

        Args:
            worst: which share of the used cells counts as the worst, by mean absolute error; at least one cell.
                Without any relation between use and error the overlap is this share on average.

        Raises:
            ValueError: for a share outside (0, 1], or if no cell is used.
        """
        if not 0 < worst <= 1:
            raise ValueError(f"worst must be above 0 and at most 1, got {worst}")
        used = self.usage > 0
        if not used.any():
            raise ValueError("overlap needs a map with at least one update")
        use, error = self.usage[used], self.absolute[used]
        count = max(1, round(worst * len(error)))
        return _ratio(use[error.argsort(descending=True, stable=True)[:count]].sum(), use.sum())


def adam_error_map(
    m: Tensor, v: Tensor, m8: Coded, v8: Coded | None, eps: float = 1e-8, weights: Tensor | None = None
) -> AdamErrorMap:
    """Compare Adam's update with the one that its quantized moments give, code by code.

    Args:
        m, v: the exact moments, any float dtype, finite, v not negative. The update is m / (√v + eps); hand over
            moments corrected for their start if the optimizer corrects them.
        m8: m quantized.
        v8: v quantized; None leaves v exact, so that the error is that of m alone.
        eps: Adam's, above zero.
        weights: how many updates each of these stands for, where they are a sample: float64, as many. One, if None.

    Returns:
        The sums, on the moments' device. A GPU adds in no fixed order: the last digits may differ between calls.

    Raises:
        ValueError: if the shapes differ, or for an eps that is not above zero.

    Source: 8-bit Optimizers via Block-wise Quantization, Appendix D, Figure 4.
    """
    check("eps", eps, Positive)  # v may round to 0
    for name, got in (("v", v), ("m8", m8.codes), ("v8", m if v8 is None else v8.codes)):
        check_shape(name, got, m)
    exact = adam_update(m, v, eps)
    delta = (exact - adam_update(m8.dequantize(), v if v8 is None else v8.dequantize(), eps)).abs()
    zero = exact == 0
    relative = torch.where(zero, 0.0, delta / exact.abs())
    columns = 1 if v8 is None else CODES
    index = _codes(m8) if v8 is None else _codes(m8) * CODES + _codes(v8)
    count = torch.ones_like(delta) if weights is None else weights.reshape(-1)
    terms = (count, count * delta, count * relative, count * ~zero)
    sums = torch.stack([(count * delta.square()).sum(), (count * exact.square()).sum()])
    return AdamErrorMap(torch.stack([_cells(index, term, columns) for term in terms]), sums)


def adam_update(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """m / (√v + eps), flat and in float64: what Adam multiplies by the learning rate."""
    return _exact(m) / (_exact(v).sqrt() + eps)


def _exact(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to(torch.float64)


def _codes(quantized: Coded) -> Tensor:
    return quantized.codes.reshape(-1).to(torch.int64)


def _cells(index: Tensor, weights: Tensor, columns: int) -> Tensor:
    """The sum of the weights at each index: float64 (256, columns)."""
    return torch.bincount(index, weights, minlength=CODES * columns).to(torch.float64).view(CODES, columns)


def _total(parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        raise ValueError("total needs at least one part, got an empty list")
    return torch.stack([part.to(parts[0].device) for part in parts]).sum(dim=0)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")
