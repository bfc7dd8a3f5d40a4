"""Where the sums of a step come from, and the records that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.gauges._measured_steps import SUMS, MeasuredStep
from narrowgauge.gauges._records import Record, rounded
from narrowgauge.gauges._segments import SHARE

Updates = Literal["sampled"] | bool
Table = tuple[list[Tensor], Tensor, str]  # parameters; float64 (parameters, 8); how they were measured


class OwnSteps:
    """Steps of narrowgauge's optimizers, which measure all of each tensor on the way."""

    def __init__(self, optimizer: Any, updates: Updates) -> None:
        self._optimizer = optimizer
        self._given: bool | None = None

    def begin(self, turn: int) -> None:
        """Have the step that comes measured."""
        self._given = self._optimizer.gauges
        self._optimizer.gauges = True

    def end(self) -> list[Table]:
        """What the step did; the optimizer is as its user left it again."""
        tables = [(ps, rows, "fused") for ps, rows in self._optimizer.measured()]
        self.abandon()
        return tables

    def abandon(self) -> None:
        """Leave the optimizer as its user left it."""
        if self._given is False:
            self._optimizer.gauges = False
            # Off is off: what was measured was not asked for by who reads this.
            self._optimizer.last_stats = type(self._optimizer.last_stats)()
        self._given = None


class OtherSteps:
    """Steps of all other optimizers, measured around them."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates) -> None:
        self._optimizer, self._share = optimizer, SHARE if updates == "sampled" else 1
        self._step: MeasuredStep | None = None

    def begin(self, turn: int) -> None:
        self._step = MeasuredStep(self._optimizer, turn, self._share)

    def end(self) -> list[Table]:
        assert self._step is not None
        tables = self._step.after()
        self._step = None
        return tables

    def abandon(self) -> None:
        self._step = None


def measures_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of narrowgauge, which nothing here may import."""
    return hasattr(type(optimizer), "measured") and hasattr(type(optimizer), "preview_unavailable")


def update_records(
    step: int, names: Sequence[str], elements: Sequence[int], table: Tensor, measured: Sequence[str]
) -> list[Record]:
    """Records of all parameters that took part in a step, after that of the whole model.

    Args:
        step: its number.
        names, elements, measured: by parameter.
        table: float64 (parameters, 9) on the host: the sums, and whether the parameter took part.
    """
    places = [place for place, row in enumerate(table[:, SUMS].tolist()) if row > 0]
    if not places:
        return []
    # Where one update is not known, neither is that of all of them.
    kinds = [measured[place] for place in places]
    kinds.insert(0, "difference" if "difference" in kinds else kinds[0])
    rows = table[places, :SUMS]
    rows = torch.cat([rows.sum(0, keepdim=True), rows])
    squared, stored, visible, nonzero, lost, lost_visible, ratios, counted = rows.unbind(1)
    values = torch.stack(
        [
            squared.sqrt(), stored / squared, visible / squared, lost / nonzero, lost_visible / nonzero,
            (ratios / counted).sqrt(),
        ],
        dim=1,
    )  # fmt: skip
    heads = [("", sum(elements[place] for place in places)), *((names[place], elements[place]) for place in places)]
    whole = zip(heads, rounded(values).tolist(), rounded(rows).tolist(), kinds, strict=True)
    return [_record(step, *head, numbers, sums, how) for head, numbers, sums, how in whole]


def _record(step: int, name: str, count: int, values: list[float], sums: list[float], measured: str) -> Record:
    norm, quality, visible_quality, lost, lost_visible, rms = values
    record: Record = {"kind": "update", "step": step, "name": name, "elements": count, "norm": norm}
    if measured != "difference":
        record |= {"descent_quality": quality, "visible_descent_quality": visible_quality}
    record |= {"lost": lost, "lost_visible": lost_visible, "nonzero": round(sums[3])}
    if sums[-1]:
        record["rms"] = rms
    return record | {"sums": sums, "measured": measured}
