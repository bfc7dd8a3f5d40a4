"""Magnitudes of hundreds of tensors at a time: what `feature_stats` says of one, by the same definitions.

How large the elements are, and how many are no numbers, is taken over all of them. What formats would lose is taken
over a sample of a long tensor (see `_segments`), with the absmax of all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from narrowgauge.gauges._features import FormatLoss, kernel_formats, kernels_take
from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._records import Record, rounded
from narrowgauge.gauges._segments import LONG, SHARE, Segments, chunks, flat, sample
from narrowgauge.kernels._tables import sent

MAGNITUDES = 6  # absmax, which is no sum; then elements, not finite, not zero, sums of |x| and of x
_COUNTS = 4
_SHARES = [field.name for field in fields(FormatLoss)]


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
    return _by_kernels(vectors, targets, turn) if kernels_take(vectors) else in_torch(vectors, targets, turn)


def _by_kernels(vectors: Sequence[Tensor], targets: Sequence[Target], turn: int) -> Tensor:
    from narrowgauge.kernels._magnitudes import count, look  # here and not above: it brings triton

    looked = look(vectors)
    bounds, factors = kernel_formats(targets, looked[:, 0])
    samples = [(SHARE, turn % SHARE) if vector.numel() >= LONG else (1, 0) for vector in vectors]
    return _joined([vector.numel() for vector in vectors], looked, count(vectors, samples, bounds, factors))


def _joined(elements: Sequence[int], looked: Tensor, counts: Tensor) -> Tensor:
    """What kernels have found of vectors as rows of a table."""
    lengths = sent(np.array(elements, dtype=np.float64), looked.device)
    return torch.cat([looked[:, :1], lengths[:, None], looked[:, 1:], counts], dim=1)


def in_torch(vectors: Sequence[Tensor], targets: Sequence[Target], turn: int) -> Tensor:
    """The same in eager torch: the specification."""
    parts = []
    for chunk in chunks([vector.numel() for vector in vectors]):
        some = vectors[chunk]
        segments = Segments.of(some)
        double = any(vector.dtype == torch.float64 for vector in some)
        x = segments.rows(some, torch.float64 if double else torch.float32)
        size = x.abs()
        finite = size < torch.inf
        size = torch.where(finite, size, 0.0)
        lengths = sent(np.array(segments.lengths, dtype=np.float64), x.device)
        sums = segments.sums([~finite, size > 0, size, torch.where(finite, x, 0.0)])
        parts.append(torch.cat([segments.largest(size)[:, None], lengths[:, None], sums], dim=1))
    found = torch.cat(parts)
    return torch.cat([found, counts_of([sample(v, turn) for v in vectors], found[:, 0], targets)], dim=1)


@dataclass(frozen=True)
class Look:
    """What is known of a vector that is looked at in passing.

    Attributes:
        found: float64, its magnitudes; or, by kernels, the rows that are still to be added.
        tiles: how many rows these are; 0 for magnitudes.
        elements: of the vector.
        kept: a copy of a sample of it.
    """

    found: Tensor
    tiles: int
    elements: int
    kept: Tensor

    @classmethod
    def at(cls, x: Tensor, kept: Tensor) -> Look:
        """Look at a vector."""
        if not kernels_take([x]):
            return cls(magnitudes(x), 0, x.numel(), kept)
        from narrowgauge.kernels._magnitudes import look_at_one

        rows = look_at_one(x)
        return cls(rows, rows.shape[0], x.numel(), kept)

    @property
    def device(self) -> torch.device:
        return self.kept.device


def rows_of(looks: Sequence[Look], targets: Sequence[Target]) -> Tensor:
    """The rows of a table of vectors that were looked at on one device, all by kernels or none: see `width`."""
    samples = [look.kept for look in looks]
    if not looks[0].tiles:
        found = torch.stack([look.found for look in looks])
        return torch.cat([found, counts_of(samples, found[:, 0], targets)], dim=1)
    from narrowgauge.kernels._magnitudes import added, count

    looked = added(torch.cat([look.found for look in looks]), [look.tiles for look in looks], largest=True)
    bounds, factors = kernel_formats(targets, looked[:, 0])
    counts = count(samples, [(1, 0)] * len(samples), bounds, factors)
    return _joined([look.elements for look in looks], looked, counts)


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
        columns += [scaled >= boundary for boundary in _boundaries(target, scaled.dtype)]
    return segments.sums(columns)


@functools.cache
def _boundaries(target: Target, dtype: torch.dtype) -> tuple[float, ...]:
    return target.boundaries_in(dtype)


def as_records(
    kind: str, names: Sequence[str], targets: Sequence[Target], step: int
) -> Callable[[Tensor], list[Record]]:
    """What makes records of a table on the host, of the tensors that have any elements.

    The values are those of `FeatureStats.as_record`, for all tensors at once. Shares are of the elements other than
    zero, of a long tensor of those in the sample.
    """
    formats = [target.name for target in targets]

    def records(table: Tensor) -> list[Record]:
        elements, nonfinite, total, sampled = (table[:, at] for at in (1, 2, 4, MAGNITUDES))
        kept, normal, saturated, beyond = table[:, MAGNITUDES + 1 :].view(-1, len(formats), _COUNTS).unbind(2)
        lost = torch.stack([sampled[:, None] - kept, kept - normal, saturated, beyond], dim=2)
        shares = rounded(lost / sampled[:, None, None]).tolist()  # 0 / 0 is no number, as it should be
        values = rounded(torch.stack([table[:, 0], total / (elements - nonfinite)], dim=1)).tolist()
        counts = table[:, 1:3].to(torch.int64).tolist()
        named = [list(zip(formats, some, strict=True)) for some in shares]
        return [
            {
                "kind": kind, "step": step, "name": name, "elements": count, "nonfinite": bad,
                "absmax": absmax, "mean": mean,
                "formats": {fmt: dict(zip(_SHARES, each, strict=True)) for fmt, each in some},
            }
            for name, (count, bad), (absmax, mean), some in zip(names, counts, values, named, strict=True)
            if count
        ]  # fmt: skip

    return records
