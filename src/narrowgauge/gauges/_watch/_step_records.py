"""What is known of every step: its loss, its loss scale, its time, RMS_t of a few parameters.

Numbers on the device stay there until the next message to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from narrowgauge.gauges._records import LOG, Record, rounded
from narrowgauge.gauges._watch._batched_rows import to_device
from narrowgauge.gauges._watch._ranks import Part

Number = Tensor | float
NO_LOSS = "the model returns none; call gauges.loss before step()"
# Columns: sum of losses; number of losses; what `LossScaleHistory.state` returns, -1 without a scaler; then for
# each parameter the sums of g^2 / max(v_hat, eps^2) and of elements.
_COLUMNS = 6
_MAXIMA = (2, 3, 4, 5)


class LossScaleHistory:
    """The history of a loss scale, read without waiting for the device.

    A scaler's scale and counters are copied on the device when a step begins. narrowgauge's scalers count skipped
    steps. torch's does not, but the scale tells: after a step it stays, or grows when the growth interval is full;
    each skipped step multiplies it by the backoff factor. So the number of steps skipped in between is a logarithm.

    Args:
        scaler: a `torch.amp.GradScaler`, or one of narrowgauge's.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, scaler: Any) -> None:
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"scaler must be a torch.amp.GradScaler or one of narrowgauge, got {type(scaler).__name__}"
            )
        self._scaler: Any = scaler
        self._skipped = 0
        self._last: tuple[float, float, bool] | None = None
        self._attempt: dict[str, Any] | None = None

    def stepped(self) -> None:
        """The optimizer has been called."""
        self._attempt = None

    def has_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the scaler has ended an attempt since the last call, without calling the optimizer.

        A scaler has a state for each optimizer from one `update` to the next, and notes there that it has stepped.
        """
        if not self._scaler.is_enabled():
            return False
        before, now = self._attempt, self._scaler._per_optimizer_states[id(optimizer)]
        self._attempt = now if now["stage"] is not OptState.STEPPED else None
        return before is not None and before["stage"] is OptState.STEPPED

    def state(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """What is known when a step begins: float64 (4,) on the device; None of a disabled scaler.

        (scale, growth tracker, skipped steps or -1, whether the device will skip this step: torch's scaler leaves
        that to optimizers with ``fused=True``).
        """
        scaler = self._scaler
        if not scaler.is_enabled():
            return None
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None:  # nothing has been scaled yet
            return torch.tensor([scaler.get_scale(), 0.0, -1.0, 0.0], dtype=torch.float64)
        found_inf = getattr(optimizer, "found_inf", None)
        known = (scale, tracker, getattr(scaler, "_skipped_steps", -1), 0.0 if found_inf is None else found_inf)
        return torch.stack(
            [
                part.to(scale.device, torch.float64, non_blocking=True).reshape(())
                if isinstance(part, Tensor)
                else scale.new_full((), part, dtype=torch.float64)
                for part in known
            ]
        )

    def read(self, state: Tensor) -> tuple[float, int]:
        """The scale of a step and how many steps were skipped before it, from `state` on the host."""
        scale, tracker, counted, found_inf = state.tolist()
        if counted >= 0:
            self._skipped = int(counted)
        elif self._last is not None:
            before, taken, skipped = self._last
            full = not skipped and taken + 1 >= self._scaler.get_growth_interval()
            expected = before * (self._scaler.get_growth_factor() if full else 1.0)
            backoff = math.log(self._scaler.get_backoff_factor())
            if 0 < scale < expected and backoff < 0:
                self._skipped += max(0, round(math.log(scale / expected) / backoff))
        self._last = scale, tracker, found_inf > 0
        return scale, self._skipped


@dataclass(eq=False)
class _Row:
    step: int
    seconds: float
    losses: list[Number]
    scale: Tensor | None
    rms: Tensor | None


class StepRows:
    """The steps since the last message.

    Args:
        taken: number of steps taken before.
        rms_of: names of the parameters whose RMS_t is measured.
        history: of the loss scale, if there is a scaler.
        every: the due steps are its multiples.

    Attributes:
        taken: number of steps taken.
        dropped_in_a_row: attempts that the scaler has skipped since.
    """

    def __init__(self, taken: int, rms_of: Sequence[str], history: LossScaleHistory | None, every: int) -> None:
        self.taken, self._every, self.dropped_in_a_row = taken, every, 0
        self._unknown = True  # whether no loss has come
        self._rms_of, self._history = rms_of, history
        self._returned: list[Number] = []
        self._given: list[Number] = []
        self._rows: list[_Row] = []
        self._scale: Tensor | None = None
        self._last = 0.0

    @property
    def waiting(self) -> bool:
        """Whether there are steps that have not been sent."""
        return bool(self._rows)

    def start(self, now: float) -> None:
        self._last = now

    def dropped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a scaler has skipped the step that losses were for: they are dropped."""
        skipped = self._history is not None and self._history.has_skipped(optimizer)
        if skipped:
            self._given, self._returned = [], []
            self.dropped_in_a_row += 1
        return skipped

    def loss_returned(self, loss: Tensor) -> None:
        """The model has returned a loss."""
        self._returned.append(_copy(loss))

    def loss_given(self, loss: Number) -> None:
        """The user has given the loss, which replaces what the model returned."""
        self._given.append(_copy(loss) if isinstance(loss, Tensor) else loss)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is about to be taken."""
        self._scale = self._history.state(optimizer) if self._history is not None else None

    def end(self, now: float, rms: Tensor | None) -> None:
        """A step has been taken; `rms` has the sums of RMS_t, float64 (parameters, 2), if they were measured."""
        self.taken, self.dropped_in_a_row = self.taken + 1, 0
        self._rows.append(_Row(self.taken, now - self._last, self._given or self._returned, self._scale, rms))
        self._last, self._given, self._returned, self._scale = now, [], [], None
        if self._history is not None:
            self._history.stepped()

    def part(self, device: torch.device) -> Part:
        """The table of the waiting rows, float64 (steps, columns) on a device; they wait no longer."""
        rows, self._rows = self._rows, []
        lines = [
            [sum(x for x in row.losses if not isinstance(x, Tensor)), len(row.losses)]
            + [-1.0 if row.scale is None else 0.0] * 4 + [0.0] * (2 * len(self._rms_of))
            for row in rows
        ]  # fmt: skip
        known = torch.tensor(lines, dtype=torch.float64, device="cpu").view(len(rows), -1)
        table = known.to(device, non_blocking=True)
        losses = [(n, x) for n, row in enumerate(rows) for x in row.losses if isinstance(x, Tensor)]
        scales = [(n, row.scale) for n, row in enumerate(rows) if row.scale is not None]
        rms = [(n, row.rms) for n, row in enumerate(rows) if row.rms is not None]
        columns = (slice(0, 1), slice(2, _COLUMNS), slice(_COLUMNS, None))
        for place, found in zip(columns, (losses, scales, rms), strict=True):
            if found:
                values = torch.stack([x.reshape(-1).to(device, non_blocking=True) for _, x in found])
                table[:, place].index_add_(0, to_device([n for n, _ in found], device), values)
        return Part(table, partial(self._records, [(row.step, row.seconds) for row in rows]), _MAXIMA)

    def _records(self, heads: list[tuple[int, float]], table: Tensor) -> list[Record]:
        records: list[Record] = []
        for (step, seconds), row in zip(heads, table, strict=True):
            scale, skipped = None, None
            if self._history is not None and row[2] >= 0:
                scale, skipped = self._history.read(row[2:_COLUMNS])
            # The same keys in every record: what is not known is null. RMS_t only where it was measured.
            record: Record = {
                "kind": "step", "step": step, "loss": float(row[0] / row[1]) if row[1] else None,
                "loss_scale": scale, "skipped": skipped, "seconds": seconds,
            }  # fmt: skip
            sums, elements = row[_COLUMNS:].view(-1, 2).unbind(1)
            values = zip(self._rms_of, rounded((sums / elements).sqrt()).tolist(), elements.tolist(), strict=True)
            rms = {name: value for name, value, count in values if count}
            records.append(record | ({"rms": rms} if rms else {}))
            if self._unknown and (row[1] or step % self._every == 0):
                self._unknown = False
                if not row[1]:
                    LOG.warning("no loss: %s", NO_LOSS)
                    records.append({"kind": "missing", "step": step, "of": "loss", "names": [], "why": NO_LOSS})
        return records


def _copy(loss: Tensor) -> Tensor:
    """A copy on the device: loops divide losses in place."""
    return loss.detach().reshape(()).to(torch.float64, copy=True)
