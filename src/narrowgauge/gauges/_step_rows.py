"""What is known of every step: its loss, its loss scale, its time, RMS_t of a few parameters.

Numbers of the device stay there until they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from narrowgauge.gauges._loss_scale import LossScaleHistory
from narrowgauge.gauges._records import Record, rounded
from narrowgauge.kernels._tables import sent

Number = Tensor | float
_COLUMNS = 6  # sum of losses, how many; what a scaler says (`LossScaleHistory.look`), -1 without one; then by
# parameter the sum of g^2 / max(v_hat, eps^2) and of how many elements


@dataclass(eq=False)
class _Row:
    step: int
    seconds: float
    losses: list[Number]
    scale: Tensor | None
    rms: Tensor | None


@dataclass(eq=False)
class StepRows:
    """The steps since the last message.

    Attributes:
        taken: how many steps have been taken.
        scale: what the loss scaler says of the present step.
        rms_of: names of the parameters whose RMS_t is taken.
    """

    LARGEST = (2, 3, 4, 5)

    taken: int = 0
    scale: Tensor | None = None
    rms_of: Sequence[str] = ()
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

    def end(self, now: float, rms: Tensor | None) -> None:
        """A step has been taken; `rms` has its sums, float64 (parameters, 2), if they were taken."""
        self.taken += 1
        self._rows.append(_Row(self.taken, now - self._last, self._told or self._returned, self.scale, rms))
        self._last, self._told, self._returned, self.scale = now, [], [], None

    def table(self, device: torch.device) -> tuple[Tensor, Callable[..., list[Record]]]:
        """The rows as float64 (steps, columns) on a device, and what makes records of them; forgotten here."""
        rows, self._rows = self._rows, []
        told = [sum(x for x in r.losses if not isinstance(x, Tensor)) for r in rows]
        rest = [-1.0] * 4 + [0.0] * (2 * len(self.rms_of))
        lines = [[loss, len(r.losses), *rest] for loss, r in zip(told, rows, strict=True)]
        known = torch.tensor(lines, dtype=torch.float64, device="cpu").view(len(rows), _COLUMNS + len(rest) - 4)
        table = known.to(device, non_blocking=True)
        there = [(n, x) for n, row in enumerate(rows) for x in row.losses if isinstance(x, Tensor)]
        if there:
            values = torch.stack([x.to(device, non_blocking=True) for _, x in there])
            table[:, 0].index_add_(0, _places([n for n, _ in there], device), values)
        scales = [(n, row.scale) for n, row in enumerate(rows) if row.scale is not None]
        if scales:
            values = torch.stack([scale.to(device, non_blocking=True) for _, scale in scales])
            table[:, 2:_COLUMNS].index_copy_(0, _places([n for n, _ in scales], device), values)
        rms = [(n, row.rms) for n, row in enumerate(rows) if row.rms is not None]
        if rms:
            values = torch.stack([sums.reshape(-1).to(device, non_blocking=True) for _, sums in rms])
            table[:, _COLUMNS:].index_copy_(0, _places([n for n, _ in rms], device), values)
        heads = [(row.step, row.seconds) for row in rows]
        return table, lambda seen, history: _records(heads, seen, history, self.rms_of)


def _records(
    heads: list[tuple[int, float]], table: Tensor, history: LossScaleHistory | None, rms_of: Sequence[str]
) -> list[Record]:
    records: list[Record] = []
    for (step, seconds), row in zip(heads, table, strict=True):
        loss = float(row[0] / row[1]) if row[1] else None
        scale: float | None = None
        skipped: int | None = None
        if history is not None and row[2] >= 0:
            scale, skipped = history.read(row[2:_COLUMNS])
        # Everywhere the same keys: what is not known is null. RMS_t is there only where it was taken.
        record: Record = {
            "kind": "step", "step": step, "loss": loss, "loss_scale": scale, "skipped": skipped, "seconds": seconds,
        }  # fmt: skip
        sums = row[_COLUMNS:].view(-1, 2)
        found = zip(rms_of, rounded((sums[:, 0] / sums[:, 1]).sqrt()).tolist(), sums[:, 1].tolist(), strict=True)
        rms = {name: value for name, value, elements in found if elements}
        records.append(record | ({"rms": rms} if rms else {}))
    return records


def _kept(loss: Tensor) -> Tensor:
    """A copy on its device: loops divide losses in place."""
    return loss.detach().reshape(()).to(torch.float64, copy=True)


def _places(numbers: list[int], device: torch.device) -> Tensor:
    return sent(np.array(numbers, dtype=np.int64), device)
