"""The scalers that skip a step whole: `DynamicLossScaler`, `StaticLossScaler` and their base.

The optimizers of narrowgauge look at all gradients before any parameter moves, and multiply them while they move
(`Optimizer.unscaling`). A scaler leaves unscaling to them where it can, makes no pass of its own, and the device
decides whether a step is skipped. The host asks for nothing: what it should warn of arrives in pinned memory, and
is read when the next step begins.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from narrowgauge._arguments import Count, Flag, Kind, Size, check, is_number
from narrowgauge._text import listed, warn
from narrowgauge.scaling._skips import Flags, SkipCounts, SkipNotices
from narrowgauge.scaling._unscale import (
    has_unscaling,
    join_over_ranks,
    nonfinite,
    slots_of,
    unscale,
    unscales_in_step,
    widen_float16,
)

_GROWTH = Kind[float](lambda x: is_number(x) and 1 < x <= sys.float_info.max, "a finite number above 1")
_BACKOFF = Kind[float](lambda x: is_number(x) and 0 < x < 1, "a number between 0 and 1, both excluded")
_FINITE = Kind[float](lambda x: is_number(x) and abs(x) <= sys.float_info.max, "a finite number")
# Float32 holds both the scale and its inverse.
_SCALE = Kind[float](lambda x: is_number(x) and 2.0**-126 <= x <= 2.0**126, "a number from 2^-126 to 2^126")


class LossScaler(torch.amp.GradScaler):
    """Base of the loss scalers; users make one of its subclasses. Every method of `torch.amp.GradScaler`.

    Args:
        device: device type that the scale lives on, such as ``"cuda"``. By default this machine's accelerator, or
            the CPU if it has none; the first loss decides the exact device.
        init_scale: the scale to begin with, from 2^-126 to 2^126.
        enabled: if False, `scale` returns what it is given, `step` calls the optimizer and the rest does nothing.

    Raises:
        ValueError: for a wrong argument, by name.
    """

    def __init__(self, device: str | None, init_scale: float, enabled: bool) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = "cpu" if accelerator is None else accelerator.type
        check("enabled", enabled, Flag)
        super().__init__(device, init_scale=float(check("init_scale", init_scale, _SCALE)), enabled=enabled)
        self._counts = SkipCounts()
        self._skipped_steps: int | Tensor = 0
        self._warned: set[str] = set()
        self._notices = SkipNotices()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        refuse_in_backward(optimizer)
        slots = slots_of(optimizer)
        self._per_optimizer_states[id(optimizer)]["unscaled"] = len(slots)
        if not allow_fp16:  # torch allows it for optimizers that unscale by themselves
            widen_float16(slots)
        values = [slot.values() for slot in slots]
        with torch.no_grad():
            unscale(values, inv_scale)
            found = self._find_nonfinite(optimizer)
        # Without gradients nothing is found.
        return found or {found_inf.device: found_inf}

    def _find_nonfinite(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Per device 1.0 if a step must be skipped whole, else 0.0."""
        slots = slots_of(optimizer)
        flags = join_over_ranks(nonfinite([slot.values() for slot in slots]), slots)
        self._counts.add(optimizer, flags)
        self._per_optimizer_states[id(optimizer)]["flags"] = flags
        return {device: vector.any().float() for device, vector in flags.items()}

    def _refuse_late(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients of groups that were added after `unscale_`: they are still scaled."""
        unscaled = self._per_optimizer_states[id(optimizer)].get("unscaled", math.inf)
        for number, slot in enumerate(slots_of(optimizer)):
            if number >= unscaled and slot.parameter.grad is not None:
                raise RuntimeError(
                    f"{slot.name}: came into the optimizer after unscale_(), and its gradient is still scaled; add "
                    "groups after update()"
                )

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that has not been done, then `optimizer.step(*args, **kwargs)`, or skip it.

        Returns:
            What the optimizer returned; None if the step was skipped.

        Raises:
            RuntimeError: if called twice since the last `update`, with a closure, which would have to be scaled,
                or with a gradient that came into the optimizer after `unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        kwargs = refuse_closure(args, kwargs)
        self._refuse_late(optimizer)
        self._notices.deliver(self._warn_skipped)
        if self._can_unscale_in_step(optimizer):
            result = self._step_unscaling(optimizer, *args, **kwargs)
        else:
            state = self._per_optimizer_states[id(optimizer)]
            # A hook before the step kept unscaling out of it; with fused=True torch would leave gradients scaled.
            if state["stage"] is OptState.READY and has_unscaling(optimizer):
                self.unscale_(optimizer)
            result = super().step(optimizer, *args, **kwargs)
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # the device has decided
                self._notify(optimizer, state.get("flags", {}))
        device = self._checked_scale("step").device
        found = [flag.to(device, non_blocking=True) for flag in self._found_inf_per_device(optimizer).values()]
        self._skipped_steps = self._skipped_steps + (torch.stack(found).amax() > 0).to(torch.int64)
        return result

    def _can_unscale_in_step(self, optimizer: torch.optim.Optimizer) -> bool:
        refuse_in_backward(optimizer)
        ready = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        return ready and unscales_in_step(optimizer)

    def _step_unscaling(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A step that unscales, inspects the gradients and decides by itself, on the device."""
        scale = self._checked_scale("step")
        with optimizer.unscaling(inverse_of(scale), whole=True) as report:
            result = optimizer.step(*args, **kwargs)
        self._counts.add(optimizer, report.flags)
        state = self._per_optimizer_states[id(optimizer)]
        found = {device: vector.any().float() for device, vector in report.flags.items()}
        # Without gradients nothing is found.
        state["found_inf_per_device"] = found or {scale.device: torch.zeros_like(scale)}
        state["stage"] = OptState.STEPPED
        self._notify(optimizer, report.flags)
        return result

    def _notify(self, optimizer: torch.optim.Optimizer, flags: Flags) -> None:
        """Send the host what the device decided by, until it has warned once."""
        if self._warned:
            return
        self._notices.send(flags, self._checked_scale("step"), [slot.name for slot in slots_of(optimizer)])
        if all(device.type != "cuda" for device in flags):
            self._notices.deliver(self._warn_skipped)

    def _checked_scale(self, method: str) -> Tensor:
        return self._check_scale_growth_tracker(method)[0]

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            flags = self._per_optimizer_states[id(optimizer)]["flags"]
            bad = {i for vector in flags.values() for i in vector.nonzero().flatten().tolist()}
            names = [slot.name for i, slot in enumerate(slots_of(optimizer)) if i in bad]
            self._warn_skipped(listed(names), self.get_scale())
            return None
        return optimizer.step(*args, **kwargs)

    def _warn_skipped(self, names: str, scale: float) -> None:
        """Called when the host learns that a step is or was skipped: whose gradients, under which scale."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Finish the iteration, after `step` of every optimizer used in it.

        Args:
            new_scale: a new scale: a number, or a tensor of one element, which is copied and not checked.

        Raises:
            ValueError: for a number that is no scale, and a tensor of more elements or with a gradient.
        """
        if not self._enabled:
            return
        if new_scale is None:
            self._update_scale()
        elif isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise ValueError(
                    "new_scale must be a number, or a tensor of one element without gradient, got "
                    f"{new_scale.numel()} elements, requires_grad={new_scale.requires_grad}"
                )
            self._checked_scale("update").copy_(new_scale.reshape(()), non_blocking=True)
        else:
            self._checked_scale("update").fill_(check("new_scale", new_scale, _SCALE))
        self._per_optimizer_states.clear()

    def _update_scale(self) -> None:
        super().update()

    @property
    def skipped(self) -> dict[str, int]:
        """Steps in which a tensor's gradient had inf or NaN, by its name; only counts above 0.

        Names are those of the optimizer's `named_parameters`, else ``group.position``. Reading it waits for the
        device. Counts of an optimizer that no longer exists are gone.
        """
        return self._counts.read(with_optimizers=True)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped whole. Reading it waits for the device."""
        steps = int(self._skipped_steps)
        self._notices.deliver(self._warn_skipped)
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, and the counts: a `torch.amp.GradScaler` can load it. Empty if not enabled."""
        if not self._enabled:
            return {}
        counts = self._counts.read(with_optimizers=False)
        return {**super().state_dict(), "skipped": counts, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, of this class or of `torch.amp.GradScaler`. Nothing if not enabled.

        Raises:
            RuntimeError: if it is empty, as that of a scaler which was not enabled.
            ValueError: if it is damaged or of a scaler of another kind; nothing is changed then.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict must be the state of a loss scaler, got {type(state_dict).__name__}")
        if state_dict:
            for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
                if key not in state_dict:
                    raise ValueError(f"state_dict must be the state of a loss scaler, got no {key!r}")
                check(f"state_dict[{key!r}]", state_dict[key], _FINITE)
            self._check_saved(state_dict)
        # A float, as torch writes it to a tensor.
        super().load_state_dict({**state_dict, "scale": float(state_dict["scale"])} if state_dict else {})
        self._counts.restart(state_dict.get("skipped", {}))
        self._skipped_steps = state_dict.get("skipped_steps", 0)

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        check("state_dict['scale']", state_dict["scale"], _SCALE)
        check("state_dict['growth_interval']", state_dict["growth_interval"], Size)
        check("state_dict['_growth_tracker']", state_dict["_growth_tracker"], Count)
        check("state_dict['skipped_steps']", state_dict.get("skipped_steps", 0), Count)
        skipped = state_dict.get("skipped", {})
        if not isinstance(skipped, Mapping) or not all(isinstance(name, str) for name in skipped):
            raise ValueError(f"state_dict['skipped'] must be a dict of counts by name, got {skipped!r:.100}")
        for name, count in skipped.items():
            check(f"state_dict['skipped'][{name!r}]", count, Count)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_counts"] = self._counts.read(with_optimizers=False)
        state["_skipped_steps"] = self.skipped_steps
        state["_notices"] = SkipNotices()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_counts": SkipCounts(state["_counts"])})


class DynamicLossScaler(LossScaler):
    """Halve the scale at inf or NaN and skip that step; double it after many good ones.

    The same numbers as `torch.amp.GradScaler`, bit for bit. Beyond it, arguments are checked, skips are counted by
    tensor (`skipped`) and in all (`skipped_steps`), float16 gradients are unscaled for optimizers that take them in
    float32, and a scale that keeps falling is warned about.

    Args:
        device: device type that the scale lives on; by default this machine's accelerator, or ``"cpu"``.
        init_scale: the scale to begin with.
        growth_factor: factor of the scale after `growth_interval` good steps; above 1.
        backoff_factor: factor of the scale at inf or NaN; between 0 and 1.
        growth_interval: good steps in a row before the scale grows.
        enabled: if False, nothing is scaled and every step is taken.

    Raises:
        ValueError: for a wrong argument, by name.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, enabled)
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor of the scale after good steps; a ValueError if it is not above 1."""
        super().set_growth_factor(check("growth_factor", new_factor, _GROWTH))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of the scale at inf or NaN; a ValueError if it is not between 0 and 1."""
        super().set_backoff_factor(check("backoff_factor", new_factor, _BACKOFF))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good steps in a row let the scale grow; a ValueError if it is no integer of at least 1."""
        super().set_growth_interval(check("growth_interval", new_interval, Size))

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        super()._check_saved(state_dict)
        if not state_dict["growth_factor"] > 1.0:
            raise ValueError(
                "state_dict must be of a DynamicLossScaler or torch.amp.GradScaler, got that of a fixed scale "
                f"(growth_factor={state_dict['growth_factor']})"
            )
        check("state_dict['backoff_factor']", state_dict["backoff_factor"], _BACKOFF)

    def _warn_skipped(self, names: str, scale: float) -> None:
        scale *= self._backoff_factor
        if scale < 1.0 and not self._warned:
            self._warned.add("scale")
            warn(
                f"the loss scale falls to {scale:g}, and {names} still had inf or NaN: scaling "
                "is not the cause; look at the loss, lower the learning rate, or train in bfloat16"
            )


class FixedLossScaler(LossScaler):
    """Base of the scalers whose scale only `update(new_scale)` and a loaded state can change."""

    def __init__(self, device: str | None, init_scale: float, enabled: bool) -> None:
        super().__init__(device, init_scale, enabled)
        self._growth_factor = self._backoff_factor = 1.0
        self._growth_interval = 2000  # unused, and part of the state
        # The scale as the host knows it; None after `update` got a tensor.
        self._known_scale: float | None = float(init_scale)

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each of an iterable of tensors, by the scale.

        Raises:
            ValueError: for a float16 tensor, alone or in a list, if the scale is above 65504: its gradient is the
                scale, which float16 does not have, so no step would ever be taken.
        """
        if self._enabled and self._known_scale is not None and self._known_scale > torch.finfo(torch.float16).max:
            _refuse_float16(outputs, self._known_scale)
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
        """The scale is fixed: a ValueError for any factor but 1."""
        if new_factor != 1.0:
            raise ValueError(
                f"new_factor must be 1.0 for {type(self).__name__}, whose scale is fixed, got {new_factor}"
            )

    set_backoff_factor = set_growth_factor

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        super()._check_saved(state_dict)
        if state_dict["growth_factor"] != 1.0 or state_dict["backoff_factor"] != 1.0:
            raise ValueError(
                f"state_dict must be of a fixed scale for {type(self).__name__}, got one that moves "
                f"(growth_factor={state_dict['growth_factor']})"
            )


class StaticLossScaler(FixedLossScaler):
    """Multiply the loss by a constant; a step with inf or NaN anywhere is skipped whole.

    The plain technique of Micikevicius et al. (2017), as the lecture has it. Choose a power of two, which rounds
    nothing; the largest that the gradients allow loses least.

    Args:
        device: device type that the scale lives on; by default this machine's accelerator, or ``"cpu"``.
        init_scale: the constant c; 8 is the lecture's.
        enabled: if False, nothing is scaled and every step is taken.

    Raises:
        ValueError: for a wrong argument, by name.
    """

    def __init__(self, device: str | None = None, init_scale: float = 8.0, enabled: bool = True) -> None:
        super().__init__(device, init_scale, enabled)

    def _warn_skipped(self, names: str, scale: float) -> None:
        if not self._warned:
            self._warned.add("skip")
            warn(
                f"a step was skipped: {names} had inf or NaN under the loss scale {scale:g}; lower init_scale if "
                "this goes on (skipped_steps, skipped), or use DynamicLossScaler or TensorLossScaler"
            )


def inverse_of(scale: Tensor) -> Tensor:
    """The factor of gradients: 1 / scale, rounded once, in float32."""
    return scale.double().reciprocal().float()


def refuse_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that moved weights during the backward pass."""
    if getattr(optimizer, "in_backward", None) is not None:
        raise RuntimeError(
            f"optimizer must move weights in step(), got {type(optimizer).__name__} with step_in_backward, which "
            "has moved them by scaled gradients already"
        )


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords without `closure=None`, which frameworks pass along. A closure's loss would not be scaled."""
    if (args and args[0] is not None) or kwargs.get("closure") is not None:
        raise RuntimeError("closure must be None: compute the loss, scale(loss).backward(), then step(optimizer)")
    return {name: value for name, value in kwargs.items() if name != "closure"}


def _refuse_float16(outputs: object, scale: float) -> None:
    if isinstance(outputs, list | tuple):
        for output in outputs:
            _refuse_float16(output, scale)
    elif isinstance(outputs, Tensor) and outputs.dtype is torch.float16:
        raise ValueError(
            f"outputs must be a float32 loss, got a float16 one, whose gradient is inf under the scale {scale:g}: "
            "compute it from model outputs in float32 (outputs.float()), or take an init_scale of at most 32768"
        )
