"""What the codes of an optimizer's moments lose, at one step of a running training.

The moments that a step makes live in registers; what stays are their codes. So what this needs is worked out
once more by the optimizer's specification, before the step is taken: the moments as the step will have them, and
the codes that it will write, of a sample of every long parameter. That asks the device which gradients are finite,
and waits for the answer, and takes some hundreds of operations, which is why it is done seldom. The sums go to the
host as those of other gauges do, and records are made of them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.gauges._packed import packed
from narrowgauge.gauges._quantization import (
    CODES,
    AdamErrorMap,
    adam_error_map,
    error_ratios,
    error_terms,
    quantization_error,
)
from narrowgauge.gauges._rank_sums import Part
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


def moment_parts(optimizer: Any, names: Mapping[Tensor, str], step: int, turn: int) -> list[Part]:
    """Tables of every quantized moment, and of Adam's update made of them all, and the records that they make.

    Args:
        optimizer: one of narrowgauge's, before a step, with gradients.
        names: of its parameters.
        step: the number of the step, for the records.
        turn: which samples are taken.
    """
    parts: list[Part] = []
    maps: list[AdamErrorMap] = []
    for some in optimizer.foresee_samples(turn):
        for moment in some.moments:
            of = [names[p] for p in some.ps]
            records = partial(_records, step, moment.slot, moment.format, of)
            parts.append((_table(moment, some.counts, some.each), (), records))
        by_slot = {moment.slot: moment for moment in some.moments}
        if by_slot.keys() == {"m", "v"} and by_slot["m"].eps:
            maps.append(_map(by_slot["m"], by_slot["v"], _weights(some)))
    if maps:
        total = AdamErrorMap.total(maps)
        parts.append((torch.cat([total.cells.flatten(), total.sums]), (), partial(_map_records, step)))
    return parts


def _table(moment: Any, counts: Sequence[int], each: int) -> Tensor:
    """What `quantization_error` says of every parameter's part of a moment: usage and sums, a row each.

    Args:
        moment: of some parameters, one after the other.
        counts: their elements.
        each: divides all of these.
    """
    if len(counts) == 1:
        error = quantization_error(moment.exact, moment)
        return torch.cat([error.usage, error.sums])[None]
    device, rows = moment.codes.device, [count // each for count in counts]
    repeats = sent(np.array(rows, dtype=np.int64), device)
    owners = torch.arange(len(rows), device=device).repeat_interleave(repeats, output_size=sum(rows))
    codes = (moment.codes.reshape(-1, each).to(torch.int64) + CODES * owners[:, None]).reshape(-1)
    usage = torch.bincount(codes, minlength=CODES * len(rows)).to(torch.float64).view(-1, CODES)
    sums = torch.stack([column.view(-1, each).sum(1) for column in error_terms(moment.exact, moment)], dim=1)
    total = torch.segment_reduce(sums, "sum", lengths=repeats, axis=0, unsafe=True)
    return torch.cat([usage, total], dim=1)


def _records(step: int, slot: str, kept_as: str, names: Sequence[str], table: Tensor) -> list[Record]:
    usage, sums = table[:, :CODES], table[:, CODES:]
    numbers, counts = error_ratios(usage, sums).T.tolist(), usage.to(torch.int64).numpy().tolist()
    return [
        {
            "kind": "state", "step": step, "name": name, "slot": slot, "format": kept_as,
            "mean_absolute": mean, "relative_norm": norm, "flushed": flushed, "usage": row,
        }
        for name, mean, norm, flushed, row in zip(names, *numbers, counts, strict=True)
    ]  # fmt: skip


def _weights(some: Any) -> Tensor:
    """How many elements of its parameter each of a sample's stands for."""
    rows = [count // some.each for count in some.counts]
    shares = np.repeat([p.numel() / count for p, count in zip(some.ps, some.counts, strict=True)], rows)
    return sent(shares, some.moments[0].codes.device).repeat_interleave(some.each)


def _map(m: Any, v: Any, weights: Tensor) -> AdamErrorMap:
    exact = [moment.exact.to(torch.float64) / moment.correction for moment in (m, v)]
    kept = [_Corrected(x.codes, x.kept.to(torch.float64) / x.correction) for x in (m, v)]
    return adam_error_map(exact[0], exact[1], kept[0], kept[1], m.eps, weights)


def _map_records(step: int, table: Tensor) -> list[Record]:
    total = AdamErrorMap(table[:-2].view(-1, CODES, CODES), table[-2:])
    usage, _, error, _ = total.cells.numpy()
    return [
        {
            "kind": "adam_error", "step": step, "name": "",
            "mean_relative": total.mean_relative, "mean_absolute": total.mean_absolute,
            "usage": packed(usage.astype("<f4")), "error": packed(error.astype("<f4")),
        }
    ]  # fmt: skip
