"""What the loss scalers share: checked arguments, unscaling that says which tensor, counters, and saving."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from narrowgauge.scaling._counts import SkipCounts
from narrowgauge.scaling._gradients import join_over_ranks, nonfinite, slots_of, unscale, widen_float16
from narrowgauge.scaling._in_step import Notices, has_unscaling, listed, unscales_in_step


class LossScaler(torch.amp.GradScaler):
    """Base of the loss scalers; not made by users. Every method of `torch.amp.GradScaler`, with its meaning.

    Args:
        device: device type that the scale lives on, such as ``"cuda"``. By default this machine's accelerator, or
            the CPU if it has none; the first loss decides the exact device.
        init_scale: the scale to begin with, a finite number above 0.
        enabled: if False, `scale` returns what it is given, `step` calls the optimizer and the rest does nothing.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """

    def __init__(self, device: str | None, init_scale: float, enabled: bool) -> None:
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = "cpu" if accelerator is None else accelerator.type
        if not isinstance(device, str):
            raise ValueError(f"device: got {device!r}, takes the name of a device type, such as 'cuda'")
        if not isinstance(enabled, bool):
            raise ValueError(f"enabled: got {enabled!r}, takes True or False")
        check_scale("init_scale", init_scale)
        super().__init__(device, init_scale=float(init_scale), enabled=enabled)
        self._counts = SkipCounts()
        self._skipped_steps: int | Tensor = 0
        self._warned: set[str] = set()
        self._notices = Notices()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        refuse_in_backward(optimizer)
        slots = slots_of(optimizer)
        self._per_optimizer_states[id(optimizer)]["unscaled"] = len(slots)
        if not allow_fp16:  # torch allows it when it only looks, for optimizers that unscale by themselves
            widen_float16(slots)
        values = [slot.values() for slot in slots]
        with torch.no_grad():
            unscale(values, inv_scale)
            found = self._look(optimizer)
        # Without gradients there is nothing to find, and nothing wrong either.
        return found or {found_inf.device: found_inf}

    def _look(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Per device 1.0 if a step must be skipped whole, else 0.0."""
        flags = self._flags(optimizer)
        self._counts.add(optimizer, flags)
        self._per_optimizer_states[id(optimizer)]["flags"] = flags
        return {device: vector.any().float() for device, vector in flags.items()}

    def _refuse_late(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to step with gradients that came into the optimizer after they were to be unscaled.

        Raises:
            RuntimeError: naming the parameter.
        """
        unscaled = self._per_optimizer_states[id(optimizer)].get("unscaled", math.inf)
        for number, slot in enumerate(slots_of(optimizer)):
            if number >= unscaled and slot.parameter.grad is not None:
                raise RuntimeError(
                    f"{slot.name}: came into the optimizer after unscale_(), and its gradient is scaled still; add "
                    "groups after update()"
                )

    @staticmethod
    def _flags(optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        slots = slots_of(optimizer)
        return join_over_ranks(nonfinite([slot.values() for slot in slots]), slots)

    def _flagged(self, optimizer: torch.optim.Optimizer) -> str:
        """The names of what was found in this step, for a message; waits for the device."""
        flags = self._per_optimizer_states[id(optimizer)]["flags"]
        bad = {i for vector in flags.values() for i in vector.nonzero().flatten().tolist()}
        return listed([slot.name for i, slot in enumerate(slots_of(optimizer)) if i in bad])

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
        self._notices.arrived(self._tell)
        if self._goes_into_step(optimizer):
            result = self._step_unscaling(optimizer, *args, **kwargs)
        else:
            state = self._per_optimizer_states[id(optimizer)]
            # Hooks are what keeps it out of the step; with fused=True torch would leave them scaled gradients.
            if state["stage"] is OptState.READY and has_unscaling(optimizer):
                self.unscale_(optimizer)
            result = super().step(optimizer, *args, **kwargs)
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # the device has decided
                self._notify(optimizer, state.get("flags", {}))
        device = self._checked_scale("step").device
        found = [flag.to(device, non_blocking=True) for flag in self._found_inf_per_device(optimizer).values()]
        self._skipped_steps = self._skipped_steps + (torch.stack(found).amax() > 0).to(torch.int64)
        return result

    def _goes_into_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether unscaling is left to the optimizer's step; what was unscaled explicitly is not."""
        refuse_in_backward(optimizer)
        ready = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        return ready and unscales_in_step(optimizer)

    def _step_unscaling(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A step that unscales, looks and decides by itself, on the device."""
        scale = self._checked_scale("step")
        with optimizer.unscaling(inverse_of(scale), whole=True) as told:
            result = optimizer.step(*args, **kwargs)
        self._counts.add(optimizer, told.flags)
        state = self._per_optimizer_states[id(optimizer)]
        found = {device: vector.any().float() for device, vector in told.flags.items()}
        # Without gradients there is nothing to find, and nothing wrong either.
        state["found_inf_per_device"] = found or {scale.device: torch.zeros_like(scale)}
        state["stage"] = OptState.STEPPED
        self._notify(optimizer, told.flags)
        return result

    def _notify(self, optimizer: torch.optim.Optimizer, flags: Mapping[torch.device, Tensor]) -> None:
        """Have the host hear of what the device has decided by."""
        if self._warned:
            return
        self._notices.send(flags, self._checked_scale("step"), [slot.name for slot in slots_of(optimizer)])
        if all(device.type != "cuda" for device in flags):
            self._notices.arrived(self._tell)

    def _checked_scale(self, method: str) -> Tensor:
        return self._check_scale_growth_tracker(method)[0]

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            self._tell(self._flagged(optimizer), self.get_scale())
            return None
        return optimizer.step(*args, **kwargs)

    def _tell(self, names: str, scale: float) -> None:
        """Called when the host knows that a step is, or was, skipped: whose gradients, under which scale."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Finish the iteration, after `step` of every optimizer used in it.

        Args:
            new_scale: a scale to go on with: a number, or a tensor of one element, which is copied and not checked.

        Raises:
            ValueError: for what is no scale.
        """
        if not self._enabled:
            return
        if new_scale is None:
            self._update_scale()
        elif isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise ValueError(
                    f"new_scale: got a tensor of {new_scale.numel()} elements, "
                    f"requires_grad={new_scale.requires_grad}; takes a number, or one element without gradient"
                )
            self._checked_scale("update").copy_(new_scale.reshape(()), non_blocking=True)
        else:
            check_scale("new_scale", new_scale)
            self._checked_scale("update").fill_(new_scale)
        self._per_optimizer_states.clear()

    def _update_scale(self) -> None:
        super().update()

    @property
    def skipped(self) -> dict[str, int]:
        """Steps in which a tensor's gradient had inf or NaN, by its name; tensors with none are left out.

        Names are those of the optimizer's `named_parameters`, else ``group.position``. Reading it waits for the
        device. Counts of an optimizer that no longer exists are gone.
        """
        return self._counts.read(with_optimizers=True)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped whole. Reading it waits for the device."""
        steps = int(self._skipped_steps)
        self._notices.arrived(self._tell)
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, and the counts: a `torch.amp.GradScaler` can load it. Empty if not enabled."""
        if not self._enabled:
            return {}
        counts = self._counts.read(with_optimizers=False)
        return {**super().state_dict(), "skipped": counts, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, of this class or of `torch.amp.GradScaler`. Nothing if not enabled.

        Raises:
            RuntimeError: if it is empty, as that of a scaler which was not enabled.
            ValueError: if it was written by a scaler of another kind, or is none; nothing is changed then.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict: got {type(state_dict).__name__}, takes the state of a loss scaler")
        if state_dict:
            for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
                if key not in state_dict:
                    raise ValueError(f"state_dict: got no {key!r}, takes the state of a loss scaler")
                check_number(f"state_dict[{key!r}]", state_dict[key], "a finite number", -math.inf, math.inf)
            self._check_saved(state_dict)
        # Floats, as torch writes them to its tensors.
        super().load_state_dict({**state_dict, "scale": float(state_dict["scale"])} if state_dict else {})
        self._counts.restart(state_dict.get("skipped", {}))
        self._skipped_steps = state_dict.get("skipped_steps", 0)

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        check_scale("state_dict['scale']", state_dict["scale"])
        check_count("state_dict['growth_interval']", state_dict["growth_interval"], 1)
        check_count("state_dict['_growth_tracker']", state_dict["_growth_tracker"], 0)
        check_count("state_dict['skipped_steps']", state_dict.get("skipped_steps", 0), 0)
        skipped = state_dict.get("skipped", {})
        if not isinstance(skipped, Mapping) or not all(isinstance(name, str) for name in skipped):
            raise ValueError(f"state_dict['skipped']: got {skipped!r:.100}, takes a dict of counts by name")
        for name, count in skipped.items():
            check_count(f"state_dict['skipped'][{name!r}]", count, 0)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_counts"] = self._counts.read(with_optimizers=False)
        state["_skipped_steps"] = self.skipped_steps
        state["_notices"] = Notices()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_counts": SkipCounts(state["_counts"])})


def check_scale(name: str, value: object) -> None:
    """Refuse what float32 cannot hold as a scale, or as its inverse.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 2.0**-126 <= value <= 2.0**126:  # type: ignore[operator]
        raise ValueError(f"{name}: got {value!r}, takes a number from 2^-126 to 2^126")


def check_number(name: str, value: object, takes: str, low: float, high: float) -> None:
    """Refuse what is no number strictly between two bounds.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Comparisons that NaN fails; an integer may be too large for a float.
    if not number or not low < value < high or not value <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError(f"{name}: got {value!r}, takes {takes}")


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no integer that torch has room for, from `least` on.

    Raises:
        ValueError: naming the argument, what it got, what it takes.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ValueError(f"{name}: got {value!r:.100}, takes an integer of at least {least}")


def inverse_of(scale: Tensor) -> Tensor:
    """What gradients are multiplied by: 1 / scale, rounded once, in float32."""
    return scale.double().reciprocal().float()


def refuse_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has stepped already.

    Raises:
        RuntimeError: naming the argument, what it got, what it takes.
    """
    if getattr(optimizer, "in_backward", None) is not None:
        raise RuntimeError(
            f"optimizer: got {type(optimizer).__name__} by step_in_backward, which has moved weights by "
            "scaled gradients already; takes one that moves them in step()"
        )


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords without a closure that is None, which frameworks pass along.

    Raises:
        RuntimeError: for a closure: the loss that it computes would have to be scaled.
    """
    if (args and args[0] is not None) or kwargs.get("closure") is not None:
        raise RuntimeError(
            "closure: got one, takes None: compute the loss, scale(loss).backward(), then step(optimizer)"
        )
    return {name: value for name, value in kwargs.items() if name != "closure"}
