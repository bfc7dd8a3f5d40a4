"""Which gradients a parameter is stepped with: some are refused before anything moves, some skipped when it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._plan import ParameterPlan


def refuse_gradient(optimizer: str, name: str, group: Mapping[str, Any], grad: Tensor) -> None:
    """Raise for what must not be stepped with.

    Args:
        optimizer, name: what to call the optimizer and the parameter.
        group, grad: the parameter's.

    Raises:
        RuntimeError: for a sparse gradient, and in a captured graph for what would wait for the device.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(f"{optimizer} does not support sparse gradients; {name} got one, takes dense ones")
    waits = group["nonfinite"] == "raise" or group["arithmetic"] == "strict"
    if waits and grad.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"step: nonfinite={group['nonfinite']!r}, arithmetic={group['arithmetic']!r} in a captured graph; "
            "takes nonfinite='skip' or 'propagate' and arithmetic='fp32' there, which never wait for the device"
        )


def refuse_nonfinite(
    grads: Sequence[Tensor],
    name: Callable[[int], str],
    inverse: Callable[[torch.device], Tensor] | None = None,
) -> None:
    """Raise for an inf or NaN; waits for each device once.

    Args:
        grads: gradients of parameters whose `nonfinite` is ``"raise"``.
        name: gives the name of a parameter, by its place.
        inverse: gives, for a device, what gradients will be multiplied by before they are to be finite.

    Raises:
        FloatingPointError: naming the first bad one.
    """
    devices: dict[torch.device, list[int]] = {}
    bad = []
    for place, grad in enumerate(grads):
        if type(grad) is Tensor and grad.device.type != "cpu" and grad.numel():
            devices.setdefault(grad.device, []).append(place)
        elif not all_finite(grad if inverse is None else grad.to(torch.float32) * inverse(grad.device)):
            bad.append(place)
    for places in devices.values():
        # The largest magnitude: exact in any format, inf or NaN if one is there.
        largest = torch._foreach_norm([grads[place] for place in places], math.inf)
        sizes = torch.stack([value.to(torch.float32) for value in largest])
        finite = torch.isfinite(sizes if inverse is None else sizes * inverse(sizes.device)).tolist()
        bad += [place for place, whole in zip(places, finite, strict=True) if not whole]
    if bad:
        raise FloatingPointError(nonfinite_message(name(min(bad))))


def nonfinite_message(name: str) -> str:
    """What is said of a parameter whose gradient is refused."""
    return f"{name}: the gradient has inf or NaN (nonfinite='raise'); no parameter was changed"


def all_finite(grad: Tensor) -> bool | Tensor:
    """Whether no element is inf or NaN: a bool, or on a GPU a 0-d tensor."""
    # As steps take it: what float32 does not hold is infinite.
    finite = torch.isfinite(grad.to(torch.float32) if grad.dtype == torch.float64 else grad).all()
    return finite if grad.device.type != "cpu" else bool(finite)


def admit(
    nonfinite: str, state: Mapping[str, Tensor], grad: Tensor, finite: Callable[[Tensor], bool | Tensor]
) -> bool | Tensor:
    """Whether this gradient may be used: a bool, or on a GPU, where nobody waits, a 0-d tensor. Counts refusals.

    Args:
        nonfinite: the option.
        state, grad: the parameter's.
        finite: `all_finite`, or what tells the same faster.
    """
    if nonfinite != "skip":
        return True
    admitted = finite(grad)
    if admitted is True:
        return True
    state["skipped"] += ~admitted if isinstance(admitted, Tensor) else not admitted
    return admitted


def skipped_steps(
    plans: Iterable[tuple[Tensor, ParameterPlan]], states: Mapping[Tensor, Mapping[str, Tensor]], told: set[str]
) -> dict[str, int]:
    """Steps that were skipped, by parameter, those with none left out; each parameter is warned of once.

    Args:
        plans, states: the parameters' plans and states.
        told: names that have been warned of; grows.
    """
    counts = {plan.name: int(states[p]["skipped"]) for p, plan in plans if "skipped" in states.get(p, {})}
    skipped = {name: count for name, count in counts.items() if count}
    for name in skipped.keys() - told:
        warnings.warn(
            f"{name}: {skipped[name]} steps skipped, its gradient had inf or NaN; lower the learning rate "
            "or the loss scale, or see which layer overflows",
            stacklevel=3,
        )
        told.add(name)
    return skipped
