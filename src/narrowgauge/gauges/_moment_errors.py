"""What the codes of an optimizer's moments lose, at one step of a running training.

The moments that a step makes live in registers; what stays are their codes. So what this needs is worked out
once more by the optimizer's specification, one parameter at a time, before the step is taken: the moments as
the step will have them, and the codes that it will write. That waits for the device and costs as much as an
eager step, which is why it is done seldom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges._quantization import AdamErrorMap, adam_error_map, quantization_error
from narrowgauge.gauges._records import Record


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


def moment_records(optimizer: Any, names: Mapping[Tensor, str], step: int) -> Iterator[Record]:
    """Records of every quantized moment, and of Adam's update made of them all.

    Args:
        optimizer: one of narrowgauge's, before a step, with gradients.
        names: of its parameters.
        step: the number of the step, for the records.
    """
    maps: list[AdamErrorMap] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = optimizer.foresee(p, group) if optimizer.cannot_foresee(p, group) is None else []
            for moment in moments:
                error = quantization_error(moment.exact, moment)
                yield {
                    "kind": "state", "step": step, "name": names[p], "slot": moment.slot, "format": moment.format,
                    "mean_absolute": error.mean_absolute, "relative_norm": error.relative_norm,
                    "flushed": error.flushed, "usage": [int(count) for count in error.usage.tolist()],
                }  # fmt: skip
            by_slot = {moment.slot: moment for moment in moments}
            if by_slot.keys() == {"m", "v"} and by_slot["m"].eps:
                maps.append(_map(by_slot["m"], by_slot["v"]))
    if maps:
        yield _map_record(AdamErrorMap.total(maps), step)


def _map(m: Any, v: Any) -> AdamErrorMap:
    exact = [moment.exact.to(torch.float64) / moment.correction for moment in (m, v)]
    kept = [_Corrected(x.codes, x.kept.to(torch.float64) / x.correction) for x in (m, v)]
    return adam_error_map(exact[0], exact[1], kept[0], kept[1], eps=m.eps)


def _map_record(total: AdamErrorMap, step: int) -> Record:
    cells = total.cells.cpu()
    return {
        "kind": "adam_error", "step": step, "name": "",
        "mean_relative": total.mean_relative, "mean_absolute": total.mean_absolute,
        "usage": _sparse(cells[0], whole=True), "error": _sparse(cells[2], whole=False),
    }  # fmt: skip


def _sparse(cells: Tensor, whole: bool) -> list[list[int | float]]:
    """[row, column, value] of the cells other than zero."""
    places = cells.nonzero()
    values = cells[places[:, 0], places[:, 1]].tolist()
    kind = int if whole else float
    return [[i, j, kind(value)] for (i, j), value in zip(places.tolist(), values, strict=True)]
