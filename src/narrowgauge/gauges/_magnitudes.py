"""Magnitudes of hundreds of tensors at a time: what `feature_stats` says of one, by the same definitions.

How large the elements are, and how many are no numbers, is taken over all of them. What formats would lose is taken
over a sample of a long tensor (see `_segments`), with the absmax of all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges._features import FeatureStats
from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._records import Record
from narrowgauge.gauges._segments import Segments, chunks, flat, sample

MAGNITUDES = 6  # absmax, which is no sum; then elements, not finite, not zero, sums of |x| and of x
_COUNTS = 4


def width(targets: Sequence[Target]) -> int:
    """Columns of a table: the magnitudes; how many sampled elements are finite and not zero; four counts a
    format.
    """
    return MAGNITUDES + 1 + _COUNTS * len(targets)


def magnitudes(x: Tensor) -> Tensor:
    """The magnitudes of one vector: float64 (MAGNITUDES,)."""
    x = x.to(torch.float32) if x.dtype.itemsize < 4 else x
    size = x.abs()
    finite = size < torch.inf
    size = torch.where(finite, size, 0.0)
    found = [
        size.max() if x.numel() else size.sum(),
        torch.full((), x.numel(), device=x.device),
        (~finite).sum(),
        torch.count_nonzero(size),
        size.sum(dtype=torch.float64),
        torch.where(finite, x, 0.0).sum(dtype=torch.float64),
    ]
    return torch.stack([value.to(torch.float64) for value in found])


def table_of(tensors: Sequence[Tensor], targets: Sequence[Target], turn: int) -> Tensor:
    """The table of some tensors of one device: float64 (tensors, width).

    Args:
        tensors: of any float dtypes; of a distributed tensor its shard is measured.
        targets: the formats.
        turn: which sample is taken.
    """
    vectors = [flat(x) for x in tensors]
    parts = []
    for chunk in chunks([vector.numel() for vector in vectors]):
        some = vectors[chunk]
        segments = Segments.of(some)
        double = any(vector.dtype == torch.float64 for vector in some)
        x = segments.rows(some, torch.float64 if double else torch.float32)
        size = x.abs()
        finite = size < torch.inf
        size = torch.where(finite, size, 0.0)
        lengths = torch.tensor(segments.lengths, dtype=torch.float64, device="cpu").to(x.device, non_blocking=True)
        sums = segments.sums([~finite, size > 0, size, torch.where(finite, x, 0.0)])
        parts.append(torch.cat([segments.largest(size)[:, None], lengths[:, None], sums], dim=1))
    found = torch.cat(parts)
    return torch.cat([found, counts_of([sample(v, turn) for v in vectors], found[:, 0], targets)], dim=1)


def counts_of(samples: Sequence[Tensor], absmax: Tensor, targets: Sequence[Target]) -> Tensor:
    """What formats would lose of samples: float64 (samples, 1 + 4 formats), see `width`.

    Args:
        samples: vectors of one device.
        absmax: of the tensors that they are from, float64 (samples,).
        targets: the formats.
    """
    segments = Segments.of(samples)
    double = any(x.dtype == torch.float64 for x in samples)
    size = segments.rows(samples, torch.float64 if double else torch.float32).abs()
    size = torch.where(size < torch.inf, size, 0.0)
    columns = [size > 0]
    for target in targets:
        scaled = size
        if target.scaled:
            scaled = size.to(torch.float32) * segments.spread(target.factor(absmax.to(torch.float32)))
        columns += [scaled >= boundary for boundary in target.boundaries_in(scaled.dtype)]
    return segments.sums(columns)


def _values(row: Tensor, targets: Sequence[Target]) -> dict[str, Any]:
    """The values of a record from a tensor's row on the host (see `FeatureStats.as_record`)."""
    nonzero, sampled = float(row[3]), float(row[MAGNITUDES])
    # Shares of a sample, as counts of the whole.
    share = nonzero / sampled if sampled else math.nan
    sums = torch.cat([row[1:MAGNITUDES], row[MAGNITUDES + 1 :] * share])
    return FeatureStats(sums, row[0], tuple(target.name for target in targets)).as_record()


def as_records(
    kind: str, names: Sequence[str], targets: Sequence[Target], step: int
) -> Callable[[Tensor], list[Record]]:
    """What makes records of a table on the host: of the tensors that have any elements."""

    def records(table: Tensor) -> list[Record]:
        rows = zip(names, table, strict=True)
        return [{"kind": kind, "step": step, "name": n, **_values(row, targets)} for n, row in rows if row[1] > 0]

    return records
