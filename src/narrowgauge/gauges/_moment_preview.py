"""What the codes of an optimizer's moments lose, at one step of a running training.

The moments that a step makes live in registers; what stays are their codes. So they are worked out once more by the
optimizer's specification before the step is taken: the moments as the step will have them, beside the codes that
it will write. A look is at one parameter, the next look at the next one, and of a long parameter at one row in
sixteen. A step that is not taken, or takes a gradient that is not finite, leaves no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges._packed import packed
from narrowgauge.gauges._quantization import CODES, AdamErrorMap, adam_error_map, error_ratios, quantization_error
from narrowgauge.gauges._rank_sums import Part
from narrowgauge.gauges._records import Record
from narrowgauge.gauges._step_rms import row_sample


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
            why = optimizer.preview_unavailable(p)
            if why is not None and optimizer.keeps_codes(p):
                found.setdefault(why, []).append(names.get(p, "?"))
    return found


class MomentPreview:
    """One look: before a step, at the moments that it will make of one parameter.

    Args:
        optimizer: one of narrowgauge's, with gradients.
        names: of its parameters.
        step: the step's number, for the records.
        look: the number of the look: which parameter, and which sample of it.
    """

    def __init__(self, optimizer: Any, names: Mapping[Tensor, str], step: int, look: int) -> None:
        self._optimizer, self._step = optimizer, step
        self._p: Tensor | None = None
        ps = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.numel() and optimizer.preview_unavailable(p) is None
        ]
        ps = [p for p in ps if optimizer.keeps_codes(p)]
        if not ps:
            return
        self._p = p = ps[look % len(ps)]
        view = optimizer.parameter_view(p)
        self._name, self._elements = names.get(p, "?"), p.numel()
        self._steps = view.state["step"].clone() if view.state else torch.zeros((), device=p.device)
        self._moments = optimizer.preview(p, row_sample(view, look // len(ps)).of)

    def parts(self) -> list[Part]:
        """After the step: tables of the parameter's moments, and of Adam's update made of both; [] without any."""
        if self._p is None or not self._moments:
            return []
        taken = self._optimizer.parameter_view(self._p).state["step"] > self._steps
        for moment in self._moments:
            taken = taken & torch.isfinite(moment.exact).all()
        parts: list[Part] = []
        for moment in self._moments:
            error = quantization_error(moment.exact, moment)
            table = torch.where(taken, torch.cat([error.usage, error.sums]), 0.0)
            parts.append((table, (), partial(_record, self._step, self._name, moment.slot, moment.format)))
        by_slot = {moment.slot: moment for moment in self._moments}
        if by_slot.keys() == {"m", "v"} and by_slot["m"].eps:
            table = torch.where(taken, _map(by_slot["m"], by_slot["v"], self._elements), 0.0)
            parts.append((table, (), partial(_map_record, self._step)))
        return parts


def _record(step: int, name: str, slot: str, kept_as: str, table: Tensor) -> list[Record]:
    usage, sums = table[:CODES], table[CODES:]
    if not usage.any():
        return []
    mean, norm, flushed = error_ratios(usage, sums).tolist()
    return [
        {
            "kind": "state", "step": step, "name": name, "slot": slot, "format": kept_as,
            "mean_absolute": mean, "relative_norm": norm, "flushed": flushed,
            "usage": usage.to(torch.int64).tolist(),
        }
    ]  # fmt: skip


def _map(m: Any, v: Any, elements: int) -> Tensor:
    """The cells and the sums of a map that counts every element of the parameter."""
    exact = [moment.exact.to(torch.float64) / moment.correction for moment in (m, v)]
    kept = [_Corrected(x.codes, x.kept.to(torch.float64) / x.correction) for x in (m, v)]
    found = adam_error_map(exact[0], exact[1], kept[0], kept[1], m.eps)
    each = elements / int(m.exact.numel())
    return each * torch.cat([found.cells.flatten(), found.sums])


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
