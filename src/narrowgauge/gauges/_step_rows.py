"""What is known of every step: its loss, its loss scale, its time. Numbers of the device stay there until sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.gauges._loss_scale import LossScaleHistory
from narrowgauge.gauges._records import Record

Number = Tensor | float
_COLUMNS = 6  # sum of losses, how many; what a scaler says (`LossScaleHistory.look`), -1 without one


@dataclass(eq=False)
class _Row:
    step: int
    seconds: float
    losses: list[Number]
    scale: Tensor | None


@dataclass(eq=False)
class StepRows:
    """The steps since the last message.

    Attributes:
        taken: how many steps have been taken.
        scale: what the loss scaler says of the present step.
    """

    LARGEST = (2, 3, 4, 5)

    taken: int = 0
    scale: Tensor | None = None
    _returned: list[Number] = field(default_factory=list)
    _told: list[Number] = field(default_factory=list)
    _rows: list[_Row] = field(default_factory=list)
    _last: float = 0.0

    @property
    def waiting(self) -> bool:
        """Whether there are steps that have not been sent."""
        return bool(self._rows)

    def start(self, now: float) -> None:
        self._last = now

    def returned(self, loss: Tensor) -> None:
        """The model has returned a loss."""
        self._returned.append(_kept(loss))

    def told(self, loss: Number) -> None:
        """The user has said the loss."""
        self._told.append(_kept(loss) if isinstance(loss, Tensor) else loss)

    def end(self, now: float) -> None:
        """A step has been taken."""
        self.taken += 1
        self._rows.append(_Row(self.taken, now - self._last, self._told or self._returned, self.scale))
        self._last, self._told, self._returned, self.scale = now, [], [], None

    def table(self, device: torch.device) -> tuple[Tensor, Callable[..., list[Record]]]:
        """The rows as float64 (steps, 6) on a device, and what makes records of them; they are forgotten here."""
        rows, self._rows = self._rows, []
        known = torch.tensor(
            [
                [sum(x for x in r.losses if not isinstance(x, Tensor)), len(r.losses), -1.0, -1.0, -1.0, -1.0]
                for r in rows
            ],
            dtype=torch.float64,
            device="cpu",
        ).view(-1, _COLUMNS)
        table = known.to(device, non_blocking=True)
        there = [(n, x) for n, row in enumerate(rows) for x in row.losses if isinstance(x, Tensor)]
        if there:
            values = torch.stack([x.to(device, non_blocking=True) for _, x in there])
            table[:, 0].index_add_(0, _places([n for n, _ in there], device), values)
        scales = [(n, row.scale) for n, row in enumerate(rows) if row.scale is not None]
        if scales:
            values = torch.stack([scale.to(device, non_blocking=True) for _, scale in scales])
            table[:, 2:].index_copy_(0, _places([n for n, _ in scales], device), values)
        heads = [(row.step, row.seconds) for row in rows]
        return table, lambda seen, history: _records(heads, seen, history)


def _records(heads: list[tuple[int, float]], table: Tensor, history: LossScaleHistory | None) -> list[Record]:
    records: list[Record] = []
    for (step, seconds), row in zip(heads, table, strict=True):
        loss = float(row[0] / row[1]) if row[1] else None
        scale: float | None = None
        skipped: int | None = None
        if history is not None and row[2] >= 0:
            scale, skipped = history.read(row[2:])
        # Everywhere the same keys: what is not known is null.
        records.append(
            {
                "kind": "step", "step": step, "loss": loss, "loss_scale": scale, "skipped": skipped,
                "seconds": seconds,
            }
        )  # fmt: skip
    return records


def _kept(loss: Tensor) -> Tensor:
    """A copy on its device: loops divide losses in place."""
    return loss.detach().reshape(()).to(torch.float64, copy=True)


def _places(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=True)
