"""One parameter's step, in eager torch: the specification that every kernel has to match.

Decode what is stored, evaluate the rule, encode what comes out. Nothing is written here: the caller gets the new
tensors and decides, so that a step can be refused after the fact without a copy of what was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._arithmetic import Fp32Arithmetic, StrictArithmetic, narrow_scalars, widest
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.rules import Arithmetic, Scalar

_FP32 = Fp32Arithmetic()
Updated = tuple[Tensor, dict[str, Tensor], Tensor]


def update(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
    noise: Callable[[], Tensor],
) -> Updated:
    """Compute a step without taking it.

    Args:
        plan: what to compute and how things are kept.
        p, grad: the parameter and its gradient.
        state: the parameter's state.
        group: its hyperparameters.
        step: the number of this step, from 1; a 0-d tensor on the device, or a number.
        noise: makes random words in p's shape.

    Returns:
        (p, state, delta): the new parameter, its new state entries, and the intended update.
    """
    low = state[plan.weight_key] if plan.weight_key is not None else None
    scalars: Mapping[str, Scalar] = plan.rule.scalars(_numbers(group, p.device), step)
    if plan.strict:
        moments: dict[str, Any] = {s.slot.name: (s.storage, s.words(state)) for s in plan.slots}
        weight = plan.weight.operand(p, low)
        dtype = widest([weight, *(word for _, words in moments.values() for word in words.values())])
        scalars = narrow_scalars(scalars, plan.rule.averaging, dtype, p.device)
        delta, moments = _apply(plan, StrictArithmetic(dtype), weight.to(dtype), grad.to(dtype), moments, scalars)
        delta = delta.to(weight.dtype)
        new_p, new_low = plan.weight.add_rounded(p, low, delta, noise)
        new_state = {k: v for s in plan.slots for k, v in s.keyed(moments[s.slot.name][1]).items()}
    else:
        decoded = {s.slot.name: s.decode(state, p.shape) for s in plan.slots}
        weight = plan.weight.read(p, low)
        delta, moments = _apply(plan, _FP32, weight, grad.to(torch.float32), decoded, scalars)
        new_p, new_low = plan.weight.add(p, low, weight, delta, noise)
        new_state = {k: v for s in plan.slots for k, v in s.encode(moments[s.slot.name]).items()}
    if plan.weight_key is not None and new_low is not None:
        new_state[plan.weight_key] = new_low
    return new_p, new_state, delta


def _numbers(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A group's hyperparameters, those that are tensors as scalars of the device.

    A tensor of one element and any shape serves as a number. On a GPU it is read by the device, as the step count
    is, so that a captured step follows it; a tensor of the host is a number of the host, and a captured one fixed.
    """

    def number(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if "cpu" in (value.device.type, device.type):
            return value.item()
        return value.detach().to(device, torch.float64).reshape(())

    return {
        key: tuple(map(number, value)) if isinstance(value, tuple | list) else number(value)
        for key, value in group.items()
        if key != "params"
    }


def _apply(
    plan: ParameterPlan,
    arithmetic: Arithmetic,
    weight: Tensor,
    grad: Tensor,
    moments: Mapping[str, Any],
    scalars: Mapping[str, Scalar],
) -> tuple[Tensor, dict[str, Any]]:
    """The rule, with the sums over the parameter that it asks for."""
    terms = plan.rule.terms(arithmetic, weight, grad, moments, scalars)
    if terms:
        # Added in float64, whose rounding is far below that of one term: the order of summation does not matter.
        sums = {name: term.to(torch.float64).sum().to(weight.dtype) for name, term in terms.items()}
        scalars = {**scalars, **sums, "elements": float(weight.numel())}
    return plan.rule.update(arithmetic, weight, grad, moments, scalars)
