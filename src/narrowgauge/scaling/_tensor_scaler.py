"""The scaler that skips tensors instead of steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from narrowgauge._text import warn
from narrowgauge.scaling._scaler import FixedLossScaler, inverse_of, refuse_closure
from narrowgauge.scaling._unscale import clear, join_over_ranks, mark, nonfinite, slots_of


class TensorLossScaler(FixedLossScaler):
    """Multiply the loss by a constant; of a step, only the tensors with inf or NaN are skipped.

    Wortsman et al. 2023, Appendix G. A spike of the gradients is often short and in one layer, in their models the
    first. A dynamic scale then drops many times within a few steps, needs thousands to recover, and loses the step
    of the whole network each time; in the end it is too low and training diverges. Here every other tensor takes
    its step, and the scale is what it was.

    What skips a tensor depends on the optimizer's group:

    - one of `narrowgauge.optim` with ``nonfinite="skip"`` does so on the device: nothing is copied to the host, and
      the counts are the optimizer's own. With ``nonfinite="raise"`` it raises.
    - for any other, the gradient of such a tensor is set to None, which every torch optimizer passes over: weight,
      decay and states stay as they are. Deciding this takes one copy of all flags to the host a step. Fused torch
      optimizers are served in the same way.

    `unscale_` before gradient clipping takes such tensors out of the norm, or one of them would spoil all others:
    their gradients are None from there on, or 0 under ``nonfinite="skip"``, and the optimizer still skips them.

    Args:
        device: device type that the scale lives on; by default this machine's accelerator, or ``"cpu"``.
        init_scale: the constant; 65536 is where torch's scaler begins, and the paper's stays there.
        enabled: if False, nothing is scaled and every step is taken.

    Raises:
        ValueError: for a wrong argument, by name.
    """

    def __init__(self, device: str | None = None, init_scale: float = 2.0**16, enabled: bool = True) -> None:
        super().__init__(device, init_scale, enabled)

    def _find_nonfinite(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return {}  # no step is skipped whole

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and take those with inf or NaN out of what follows.

        Raises:
            RuntimeError: if called twice since the last `update`, or after `step`.
            ValueError: for a float16 gradient in an optimizer that is not of `narrowgauge.optim`.
        """
        if not self._enabled:
            return
        super().unscale_(optimizer)
        with torch.no_grad():
            self._drop(optimizer)
            values = self._handled(optimizer)
            flags = join_over_ranks(nonfinite(values), slots_of(optimizer))
            clear(values, flags)
        self._per_optimizer_states[id(optimizer)]["cleared"] = flags

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that has not been done, then `optimizer.step(*args, **kwargs)` for all finite tensors.

        Returns:
            What the optimizer returned.

        Raises:
            RuntimeError: if called twice since the last `update`, or with a closure, which would have to be scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        kwargs = refuse_closure(args, kwargs)
        self._refuse_late(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        handled = [slot.handles_nonfinite for slot in slots_of(optimizer)]
        if any(handled):
            self._counts.counts_itself(optimizer)
        unscaling: AbstractContextManager[Any] = nullcontext()
        if all(handled) and self._can_unscale_in_step(optimizer):
            unscaling = optimizer.unscaling(inverse_of(self._checked_scale("step")), whole=False)
        elif state["stage"] is OptState.READY:
            super().unscale_(optimizer)
            self._drop(optimizer)
        else:
            with torch.no_grad():
                mark(self._handled(optimizer)[: state["unscaled"]], state["cleared"])
        with unscaling:
            result = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _handled(self, optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
        """The gradients that the optimizer skips by itself, None in the places of the others."""
        return [slot.values() if slot.handles_nonfinite else None for slot in slots_of(optimizer)]

    def _drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the other gradients to None where they have inf or NaN: one copy to the host per device, for all."""
        slots = slots_of(optimizer)
        values = [None if slot.handles_nonfinite else slot.values() for slot in slots]
        flags = join_over_ranks(nonfinite(values), slots)
        self._counts.add(optimizer, flags)
        for vector in flags.values():
            for slot, bad in zip(slots, vector.tolist(), strict=True):
                if bad:
                    slot.parameter.grad = None
                    self._warn(slot.name)

    def _warn(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warn(
                f"{name}: its step was skipped, its gradient had inf or NaN under the loss scale "
                f"{self.get_scale():g}; if this goes on (see skipped), lower init_scale or the learning rate"
            )
