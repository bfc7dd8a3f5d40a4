"""Magnitudes of hundreds of tensors at a time, by the definitions of `feature_stats`.

Magnitudes and counts of non-finite elements are of all elements. What formats would lose is measured on a sample of
a long tensor, with the absmax of all of it.

A table has one row a tensor: absmax; elements, non-finite, nonzero, sums of |x| and of x; then of the sample how
many elements are finite and nonzero, and four counts a format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._magnitudes import (
    FormatLoss,
    finite,
    kernel_formats,
    kernels_take,
    reached,
    vector_magnitudes,
)
from narrowgauge.gauges._records import Record, rounded
from narrowgauge.gauges._watch._batched_rows import BatchedRows, Sample, chunks, flat, to_device

MAGNITUDES = 6  # columns before those of the sample
_COUNTS = 4
_SHARES = [field.name for field in fields(FormatLoss)]


def width(targets: Sequence[Target]) -> int:
    """Columns of a table."""
    return MAGNITUDES + 1 + _COUNTS * len(targets)


def table_of(tensors: Sequence[Tensor], targets: Sequence[Target], sample: Sample) -> Tensor:
    """The table of tensors of one device, or of their local shards: float64 (tensors, width)."""
    vectors = [flat(x) for x in tensors]
    return (_by_kernels if kernels_take(vectors) else in_torch)(vectors, targets, sample)


def _by_kernels(vectors: Sequence[Tensor], targets: Sequence[Target], sample: Sample) -> Tensor:
    from narrowgauge.kernels._magnitudes import count, measure  # here: importing it imports triton

    found = measure(vectors)
    bounds, factors = kernel_formats(targets, found[:, 0])
    counts = count(vectors, [sample.rows_of(x.numel()) for x in vectors], bounds, factors)
    return _joined([x.numel() for x in vectors], found, counts)


def _joined(elements: Sequence[int], found: Tensor, counts: Tensor) -> Tensor:
    """Results of kernels as rows of a table."""
    lengths = to_device(elements, found.device, np.float64)
    return torch.cat([found[:, :1], lengths[:, None], found[:, 1:], counts], dim=1)


def in_torch(vectors: Sequence[Tensor], targets: Sequence[Target], sample: Sample) -> Tensor:
    """The same in eager torch: the specification."""
    parts = []
    for chunk in chunks([x.numel() for x in vectors]):
        batched, rows = _rows(vectors[chunk])
        x, size = finite(rows)
        lengths = to_device(batched.lengths, x.device, np.float64)
        sums = batched.sums([x.isnan(), size > 0, size, x.nan_to_num(0.0)])
        parts.append(torch.cat([batched.largest(size)[:, None], lengths[:, None], sums], dim=1))
    found = torch.cat(parts)
    return torch.cat([found, format_counts([sample.of(x) for x in vectors], found[:, 0], targets)], dim=1)


def format_counts(samples: Sequence[Tensor], absmax: Tensor, targets: Sequence[Target]) -> Tensor:
    """What formats would lose of samples: the columns of a table after the magnitudes.

    Args:
        samples: vectors of one device.
        absmax: of the tensors that they are from, float64 (samples,).
        targets: the formats.
    """
    batched, rows = _rows(samples)
    _, size = finite(rows)

    def factor(target: Target) -> Tensor:
        return batched.spread(target.factor(absmax.to(torch.float32)))

    return batched.sums([size > 0, *reached(size, targets, factor)])


def _rows(vectors: Sequence[Tensor]) -> tuple[BatchedRows, Tensor]:
    batched, double = BatchedRows.of(vectors), any(x.dtype == torch.float64 for x in vectors)
    return batched, batched.rows(vectors, torch.float64 if double else torch.float32)


@dataclass(frozen=True)
class TensorMeasurement:
    """The magnitudes of one vector, measured when a hook sees it.

    Attributes:
        found: float64 (6,); by kernels rows (tiles, 5), which are still to be added.
        tiles: number of rows; 0 without kernels.
        elements: of the vector.
        sample: a copy of a sample of it, perhaps of no element.
    """

    found: Tensor
    tiles: int
    elements: int
    sample: Tensor

    @classmethod
    def of(cls, x: Tensor, sample: Sample | None) -> TensorMeasurement:
        # A copy: the memory of a feature is the model's to free, and to write to.
        copy = sample.copy_of(x) if sample is not None else x.new_empty(0)
        if not kernels_take([x]):
            return cls(vector_magnitudes(x), 0, x.numel(), copy)
        from narrowgauge.kernels._magnitudes import tile_sums

        rows = tile_sums(x)
        return cls(rows, rows.shape[0], x.numel(), copy)


def rows_of(measured: Sequence[TensorMeasurement], targets: Sequence[Target]) -> Tensor:
    """The table of vectors of one device, all measured by kernels or none."""
    samples = [one.sample for one in measured]
    if not measured[0].tiles:
        found = torch.stack([one.found for one in measured])
        return torch.cat([found, format_counts(samples, found[:, 0], targets)], dim=1)
    from narrowgauge.kernels._magnitudes import add_rows, count

    found = add_rows(torch.cat([one.found for one in measured]), [one.tiles for one in measured], largest=True)
    bounds, factors = kernel_formats(targets, found[:, 0])
    counts = count(samples, [(1, 0)] * len(samples), bounds, factors)
    return _joined([one.elements for one in measured], found, counts)


def as_records(
    kind: str, names: Sequence[str], targets: Sequence[Target], step: int
) -> Callable[[Tensor], list[Record]]:
    """What makes records of a table on the host, of the tensors with elements.

    ``mean`` is that of magnitudes, ``formats`` has the shares of `FormatLoss`.
    """
    formats = [target.name for target in targets]

    def records(table: Tensor) -> list[Record]:
        elements, nonfinite, total, sampled = (table[:, column] for column in (1, 2, 4, MAGNITUDES))
        kept, normal, saturated, beyond = table[:, MAGNITUDES + 1 :].view(-1, len(formats), _COUNTS).unbind(2)
        lost = torch.stack([sampled[:, None] - kept, kept - normal, saturated, beyond], dim=2)
        shares = rounded(lost / sampled[:, None, None]).tolist()  # NaN if there is nothing to lose
        values = rounded(torch.stack([table[:, 0], total / (elements - nonfinite)], dim=1)).tolist()
        counts = table[:, 1:3].to(torch.int64).tolist()
        return [
            {
                "kind": kind, "step": step, "name": name, "elements": count, "nonfinite": bad,
                "absmax": absmax, "mean": mean,
                "formats": {
                    form: dict(zip(_SHARES, each, strict=True)) for form, each in zip(formats, some, strict=True)
                },
            }
            for name, (count, bad), (absmax, mean), some in zip(names, counts, values, shares, strict=True)
            if count
        ]  # fmt: skip

    return records
