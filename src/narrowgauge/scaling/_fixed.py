"""Scales that stay: the whole step skipped at inf or NaN, or just the tensors that have them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from narrowgauge.scaling._base import LossScaler, inverse_of, refuse_closure
from narrowgauge.scaling._gradients import clear, join_over_ranks, mark, nonfinite, slots_of


class _FixedLossScaler(LossScaler):
    """A scale that only `update(new_scale)` and a loaded state can change."""

    def __init__(self, device: str | None, init_scale: float, enabled: bool) -> None:
        super().__init__(device, init_scale, enabled)
        self._growth_factor = self._backoff_factor = 1.0
        self._growth_interval = 2000  # moot, and part of the interface
        # What the host knows without asking the device; None after it was given a tensor.
        self._known_scale: float | None = float(init_scale)

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each of an iterable of tensors, by the scale.

        Raises:
            ValueError: for a float16 tensor in a list or alone, if the scale is above 65504: its gradient is the
                scale, which float16 does not have, so no step would ever be taken.
        """
        if self._enabled and self._known_scale is not None and self._known_scale > torch.finfo(torch.float16).max:
            refuse_float16(outputs, self._known_scale)
        return super().scale(outputs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        if new_scale is not None:
            self._known_scale = None if isinstance(new_scale, Tensor) else float(new_scale)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._enabled:
            self._known_scale = state_dict["scale"]

    def _update_scale(self) -> None:
        self._checked_scale("update")

    def set_growth_factor(self, new_factor: float) -> None:
        """Refuse anything but 1: the scale is fixed.

        Raises:
            ValueError: for another factor.
        """
        self._refuse_factor("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Refuse anything but 1: the scale is fixed.

        Raises:
            ValueError: for another factor.
        """
        self._refuse_factor("backoff_factor", new_factor)

    def _refuse_factor(self, name: str, value: float) -> None:
        if value != 1.0:
            raise ValueError(f"{name}: got {value!r}, {type(self).__name__} takes 1.0 only: its scale is fixed")

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        super()._check_saved(state_dict)
        if state_dict["growth_factor"] != 1.0 or state_dict["backoff_factor"] != 1.0:
            raise ValueError(
                f"state_dict: got growth_factor={state_dict['growth_factor']}, the state of a scale that moves; "
                f"{type(self).__name__} takes that of a fixed one"
            )


def refuse_float16(outputs: object, scale: float) -> None:
    """Refuse a loss whose gradient overflows before the backward pass has begun.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """
    if isinstance(outputs, list | tuple):
        for output in outputs:
            refuse_float16(output, scale)
    elif isinstance(outputs, Tensor) and outputs.dtype is torch.float16:
        raise ValueError(
            f"outputs: got a float16 loss, the gradient of which is inf under the scale {scale:g}; takes a float32 "
            "one, computed from model outputs in float32 (outputs.float()), or an init_scale of at most 32768"
        )


class StaticLossScaler(_FixedLossScaler):
    """Multiply the loss by a constant; a step with inf or NaN anywhere is skipped whole.

    The plain technique of Micikevicius et al. (2017), as the lecture has it. Choose a power of two, which rounds
    nothing; the largest that the gradients allow loses least.

    Args:
        device: device type that the scale lives on; by default this machine's accelerator, or ``"cpu"``.
        init_scale: the constant c; 8 is the lecture's.
        enabled: if False, nothing is scaled and every step is taken.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """

    def __init__(self, device: str | None = None, init_scale: float = 8.0, enabled: bool = True) -> None:
        super().__init__(device, init_scale, enabled)

    def _tell(self, names: str, scale: float) -> None:
        if not self._warned:
            self._warned.add("skip")
            warnings.warn(
                f"a step was skipped: {names} had inf or NaN under the loss scale {scale:g}; lower init_scale if "
                "this goes on (skipped_steps, skipped), or use DynamicLossScaler or TensorLossScaler",
                stacklevel=5,
            )


class TensorLossScaler(_FixedLossScaler):
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
        ValueError: naming the argument, what it got, what it takes.
    """

    def __init__(self, device: str | None = None, init_scale: float = 2.0**16, enabled: bool = True) -> None:
        super().__init__(device, init_scale, enabled)

    def _look(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
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
        slots = slots_of(optimizer)
        itself = all(slot.handles_nonfinite for slot in slots)
        if any(slot.handles_nonfinite for slot in slots):
            self._counts.counts_itself(optimizer)
        if itself and self._goes_into_step(optimizer):
            with optimizer.unscaling(inverse_of(self._checked_scale("step")), whole=False):
                result = optimizer.step(*args, **kwargs)
            state["stage"] = OptState.STEPPED
            return result
        if state["stage"] is OptState.READY:
            super().unscale_(optimizer)
            self._drop(optimizer)
        else:
            with torch.no_grad():
                mark(self._handled(optimizer)[: state["unscaled"]], state["cleared"])
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
            warnings.warn(
                f"{name}: its step was skipped, its gradient had inf or NaN under the loss scale "
                f"{self.get_scale():g}; if this goes on (see skipped), lower init_scale or the learning rate",
                stacklevel=4,
            )
