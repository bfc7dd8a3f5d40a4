"""What the codes of an optimizer's moments lose, at one step of a running training.

The moments that a step makes live in registers; what stays are their codes. So what this needs is worked out
once more by the optimizer's specification, before the step is taken: the moments as the step will have them, and
the codes that it will write, of a sample of every long parameter. That waits for the device and takes some hundreds
of operations, which is why it is done seldom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowgauge.gauges._quantization import (
    CODES,
    AdamErrorMap,
    QuantizationError,
    adam_error_map,
    error_terms,
    quantization_error,
)
from narrowgauge.gauges._records import Record
from narrowgauge.kernels._tables import sent


@dataclass(frozen=True, eq=False)
class _Corrected:
    """A moment divided by its correction for a start at zero."""

    codes: Tensor
    values: Tensor

    def dequantize(self) -> Tensor:
        return self.values


def reasons(optimizer: Any, names: Mapping[Tensor, str]) -> dict[str, list[str]]:
    """Why there are no records of quantized moments, by reason the names of the parameters that have some."""
    found: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            why = optimizer.cannot_foresee(p, group)
            if why is not None and optimizer.keeps_codes(p):
                found.setdefault(why, []).append(names.get(p, "?"))
    return found


def moment_records(optimizer: Any, names: Mapping[Tensor, str], step: int, turn: int) -> Iterator[Record]:
    """Records of every quantized moment, and of Adam's update made of them all.

    Args:
        optimizer: one of narrowgauge's, before a step, with gradients.
        names: of its parameters.
        step: the number of the step, for the records.
        turn: which samples are taken.
    """
    maps: list[AdamErrorMap] = []
    found: dict[Tensor, list[Record]] = {}
    for some in optimizer.foresee_samples(turn):
        for moment in some.moments:
            for p, error in zip(some.ps, _errors(moment, some.counts, some.each), strict=True):
                record: Record = {
                    "kind": "state", "step": step, "name": names[p], "slot": moment.slot, "format": moment.format,
                    "mean_absolute": error.mean_absolute, "relative_norm": error.relative_norm,
                    "flushed": error.flushed, "usage": error.usage.to(torch.int64).numpy().tolist(),
                }  # fmt: skip
                found.setdefault(p, []).append(record)
        by_slot = {moment.slot: moment for moment in some.moments}
        if by_slot.keys() == {"m", "v"} and by_slot["m"].eps:
            maps.append(_map(by_slot["m"], by_slot["v"]))
    for p in names:
        yield from found.get(p, ())
    if maps:
        yield _map_record(AdamErrorMap.total(maps), step)


def _errors(moment: Any, counts: Sequence[int], each: int) -> list[QuantizationError]:
    """What `quantization_error` says of every parameter's part of a moment, on the host.

    Args:
        moment: of some parameters, one after the other.
        counts: their elements.
        each: divides all of these.
    """
    if len(counts) == 1:
        error = quantization_error(moment.exact, moment)
        return [QuantizationError(error.usage.cpu(), error.sums.cpu())]
    device, rows = moment.codes.device, [count // each for count in counts]
    repeats = sent(np.array(rows, dtype=np.int64), device)
    owners = torch.arange(len(rows), device=device).repeat_interleave(repeats, output_size=sum(rows))
    codes = (moment.codes.reshape(-1, each).to(torch.int64) + CODES * owners[:, None]).reshape(-1)
    usage = torch.bincount(codes, minlength=CODES * len(rows)).to(torch.float64).view(-1, CODES)
    sums = torch.stack([column.view(-1, each).sum(1) for column in error_terms(moment.exact, moment)], dim=1)
    total = torch.segment_reduce(sums, "sum", lengths=repeats, axis=0, unsafe=True)
    table = torch.cat([usage, total], dim=1).cpu()
    return [QuantizationError(row[:CODES], row[CODES:]) for row in table]


def _map(m: Any, v: Any) -> AdamErrorMap:
    exact = [moment.exact.to(torch.float64) / moment.correction for moment in (m, v)]
    kept = [_Corrected(x.codes, x.kept.to(torch.float64) / x.correction) for x in (m, v)]
    return adam_error_map(exact[0], exact[1], kept[0], kept[1], eps=m.eps)


def _map_record(total: AdamErrorMap, step: int) -> Record:
    cells = total.cells.cpu().numpy()
    return {
        "kind": "adam_error", "step": step, "name": "",
        "mean_relative": total.mean_relative, "mean_absolute": total.mean_absolute,
        "usage": _sparse(cells[0].astype(np.int64)), "error": _sparse(cells[2]),
    }  # fmt: skip


def _sparse(cells: npt.NDArray[Any]) -> list[list[int | float]]:
    """[row, column, value] of the cells other than zero."""
    rows, columns = cells.nonzero()  # numpy makes lists some ten times as fast as torch
    return [list(cell) for cell in zip(rows.tolist(), columns.tolist(), cells[rows, columns].tolist(), strict=True)]
