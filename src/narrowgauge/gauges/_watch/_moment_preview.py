"""What the codes of an optimizer's moments lose, at one step of a running training.

A step stores only the codes of its new moments. So before the step its specification computes the moments once
more, exact and as codes. One parameter is previewed at a time, the next one at the next due step, and of a long
parameter one row in sixteen. A step that is not taken, or whose gradient is not finite, leaves no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges._quantization import (
    CODES,
    AdamErrorMap,
    QuantizationError,
    adam_error_map,
    quantization_error,
)
from narrowgauge.gauges._records import Record, packed
from narrowgauge.gauges._watch._batched_rows import BlockSample
from narrowgauge.gauges._watch._ranks import Part


@dataclass(frozen=True, eq=False)
class _Corrected:
    """A quantized moment divided by its bias correction."""

    codes: Tensor
    values: Tensor

    def dequantize(self) -> Tensor:
        return self.values


def preview_unavailable(optimizer: Any, names: Mapping[Tensor, str]) -> dict[str, list[str]]:
    """Why moments cannot be previewed: by reason the names of the parameters with quantized moments."""
    found: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            why = optimizer.preview_unavailable(p)
            if why is not None and optimizer.keeps_codes(p):
                found.setdefault(why, []).append(names.get(p, "?"))
    return found


class MomentPreview:
    """A preview of the moments that the next step will make of one parameter.

    Args:
        optimizer: one of narrowgauge's, with gradients.
        names: of its parameters.
        step: the step's number, for the records.
        number: of the preview: chooses the parameter, and the sample of its rows.
    """

    def __init__(self, optimizer: Any, names: Mapping[Tensor, str], step: int, number: int) -> None:
        self._optimizer, self._step = optimizer, step
        ps = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        ps = [p for p in ps if optimizer.preview_unavailable(p) is None and optimizer.keeps_codes(p)]
        self._moments: Any = []
        if not ps:
            return
        self._p = p = ps[number % len(ps)]
        view = optimizer.parameter_view(p)
        self._name, self._elements = names.get(p, "?"), p.numel()
        self._steps = view.state["step"].clone() if view.state else torch.zeros((), device=p.device)
        self._moments = optimizer.preview(p, BlockSample.of_view(view, number // len(ps)).of)

    def parts(self) -> list[Part]:
        """After the step: tables of the parameter's moments, and of Adam's update made of both."""
        if not self._moments:
            return []
        taken = self._optimizer.parameter_view(self._p).state["step"] > self._steps
        for moment in self._moments:
            taken = taken & torch.isfinite(moment.exact).all()
        parts: list[Part] = []
        for moment in self._moments:
            error = quantization_error(moment.exact, moment)
            table = torch.where(taken, torch.cat([error.usage, error.sums]), 0.0)
            about = {"slot": moment.slot, "format": moment.format}
            about |= {"fed_back": 1} if moment.fed_back else {}
            parts.append(Part(table, partial(_record, self._step, self._name, about)))
        by_slot = {moment.slot: moment for moment in self._moments}
        if by_slot.keys() == {"m", "v"} and by_slot["m"].eps:
            table = torch.where(taken, _map(by_slot["m"], by_slot["v"], self._elements), 0.0)
            parts.append(Part(table, partial(_map_record, self._step)))
        return parts


def _record(step: int, name: str, about: Record, table: Tensor) -> list[Record]:
    error = QuantizationError(table[:CODES], table[CODES:])
    if not error.usage.any():
        return []
    return [
        {
            "kind": "state", "step": step, "name": name, **about,
            "mean_absolute": error.mean_absolute, "relative_norm": error.relative_norm, "flushed": error.flushed,
            "usage": error.usage.to(torch.int64).tolist(),
        }
    ]  # fmt: skip


def _map(m: Any, v: Any, elements: int) -> Tensor:
    """Cells and sums of an error map, scaled from the sample to all elements."""
    exact = [moment.exact.to(torch.float64) / moment.correction for moment in (m, v)]
    stored = [_Corrected(x.codes, x.kept.to(torch.float64) / x.correction) for x in (m, v)]
    found = adam_error_map(exact[0], exact[1], stored[0], stored[1], m.eps)
    return elements / int(m.exact.numel()) * torch.cat([found.cells.flatten(), found.sums])


def _map_record(step: int, table: Tensor) -> list[Record]:
    total = AdamErrorMap(table[:-2].view(-1, CODES, CODES), table[-2:])
    usage, _, error, _ = total.cells.numpy()
    if not usage.any():
        return []
    return [
        {
            "kind": "adam_error", "step": step, "name": "",
            "mean_relative": total.mean_relative, "mean_absolute": total.mean_absolute,
            "usage": packed(usage.astype("<f4")), "error": packed(error.astype("<f4")),
        }
    ]  # fmt: skip
