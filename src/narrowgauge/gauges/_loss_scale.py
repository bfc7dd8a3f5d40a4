"""The history of a loss scale, read without waiting for the device that decides it.

At the beginning of each step a scaler's scale and counters are copied on the device, one small kernel, and go
to the host with everything else. The scalers of narrowgauge count skipped steps. torch's does not, but its
scale
tells: after a step that was taken it stays, or grows when the growth interval is full; each step that was
    skipped multiplies
it by the backoff factor. So the number of steps skipped between two looks is a logarithm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class LossScaleHistory:
    """What a `torch.amp.GradScaler`, or one of narrowgauge's, has done.

    Args:
        scaler: the scaler.

    Raises:
        TypeError: for what is none.
    """

    def __init__(self, scaler: Any) -> None:
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"scaler: got {type(scaler).__name__}, takes a torch.amp.GradScaler or one of narrowgauge"
            )
        self._scaler: Any = scaler
        self._skipped = 0
        self._last: tuple[float, float, bool] | None = None

    def look(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """What is known when a step begins: float64 (4,) on the device; None of a disabled scaler.

        (scale, growth tracker, skipped steps or -1, whether this step will be held on the device, which torch's
        scaler leaves to optimizers with ``fused=True``).
        """
        scaler = self._scaler
        if not scaler.is_enabled():
            return None
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None:  # nothing has been scaled yet
            return torch.tensor([scaler.get_scale(), 0.0, -1.0, 0.0], dtype=torch.float64)
        counted = getattr(scaler, "_skipped_steps", -1)
        held = getattr(optimizer, "found_inf", None)
        known = (scale, tracker, counted, 0.0 if held is None else held)
        return torch.stack(
            [
                part.to(scale.device, torch.float64, non_blocking=True).reshape(())
                if isinstance(part, Tensor)
                else scale.new_full((), part, dtype=torch.float64)
                for part in known
            ]
        )

    def read(self, seen: Tensor) -> tuple[float, int]:
        """The scale of a step and how many have been skipped by then, from what `look` found, on the host."""
        scale, tracker, counted, held = seen.tolist()
        if counted >= 0:
            self._skipped = int(counted)
        elif self._last is not None:
            before, taken, skipped = self._last
            full = not skipped and taken + 1 >= self._scaler.get_growth_interval()
            expected = before * (self._scaler.get_growth_factor() if full else 1.0)
            backoff = math.log(self._scaler.get_backoff_factor())
            if 0 < scale < expected and backoff < 0:
                self._skipped += max(0, round(math.log(scale / expected) / backoff))
        self._last = scale, tracker, held > 0
        return scale, self._skipped
