"""What a rule must keep to, checked on a CPU when an optimizer is made: kernels and storages rely on it unasked.

The equation runs on tiny tensors. What it raises there is left to the first step, since it may be made for other
shapes, unless it would run with tensors for scalars. What it returns is compared with what it declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import check_choice
from narrowgauge.optim._eager import Fp32Arithmetic
from narrowgauge.rules import Rule

_SHAPES = ((2, 3), (3,))
_TAKEN = ("weight", "grad", "step", "skipped")  # by a step's operands, and by what a state has beside moments


def check_rule(rule: Rule, group: Mapping[str, Any]) -> None:
    """Refuse a rule whose equation does not fit what it declares.

    Raises:
        ValueError: naming the rule, and what is wrong: its slots' names, scalars that it averages with and does not
            have, an update or moments other than declared, an argument changed in place.
        TypeError: for an equation that takes a scalar for a tensor, as ``torch.maximum(x, s["eps"])`` does.
    """
    declared = [slot.name for slot in rule.moments]
    if twice := {name for name in declared if declared.count(name) > 1}:
        raise ValueError(f"moments of rule {rule.name!r} must have different names, got {min(twice)!r} twice")
    for slot in rule.moments:
        if not slot.name.isidentifier() or slot.name in _TAKEN:
            raise ValueError(
                f"slots of rule {rule.name!r} must have names like 'm', none of {', '.join(_TAKEN)}, got "
                f"{slot.name!r}"
            )
        if slot.normalizer is not None:
            check_choice(f"normalizer of slot {slot.name!r} of rule {rule.name!r}", slot.normalizer, declared)
    for shape in _SHAPES:
        _check_equation(rule.of_dim(len(shape)), group, shape)


@torch.inference_mode(False)
@torch.no_grad()
def _check_equation(rule: Rule, group: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    name, slots = rule.name, [slot.name for slot in rule.slots(group)]
    weight, grad = (torch.full(shape, x, dtype=torch.float32, device="cpu") for x in (0.5, 0.25))
    moments = _Names({slot: torch.full_like(weight, 0.125) for slot in slots})
    arithmetic, returned, effects, s = Fp32Arithmetic(), dict[str, Any](), dict[str, Any](), _Names()
    sums, taken = dict[str, float](), list[str]()
    try:
        s |= {scalar: float(value) for scalar, value in rule.scalars(group, 1).items()}
        sums = {term: float(x.sum()) for term, x in rule.terms(arithmetic, weight, grad, moments, s).items()}
        taken = [*s, "elements"]
        s |= sums | ({"elements": float(weight.numel())} if sums else {})
        if type(rule).direction is not Rule.direction:
            returned["direction"] = rule.direction(arithmetic, weight, grad, moments, s)
        returned["update"] = rule.update(arithmetic, weight, grad, moments, s)
        effects |= rule.remaining_effect(arithmetic, weight, returned["update"][1], s)
    except _Unknown as error:
        known = ", ".join(map(repr, (*slots, *s)))
        raise ValueError(
            f"the equation of rule {name!r} must read names of its slots and scalars, {known}, got {error}"
        ) from error
    except Exception as error:  # the first step raises it again, or does not: it may be made for other shapes
        if isinstance(error, AttributeError | TypeError) and s:
            _refuse_tensors(rule, (weight, grad, moments), s, error)
    for term in sums:
        if term in taken:
            raise ValueError(f"terms of rule {name!r} must have names that no scalar has, got {term!r}")
    for method, result in returned.items():
        _check_returned(f"{method} of rule {name!r}", result, weight, slots)
    for effect in effects:
        check_choice(f"remaining_effect of rule {name!r}", effect, slots)
    for scalar in rule.averaging if s else ():
        check_choice(f"averaging of rule {name!r}", scalar, list(s))
    for argument, tensor in {"weight": weight, "grad": grad, **moments}.items():
        if tensor._version:
            raise ValueError(
                f"the equation of rule {name!r} must not change {argument!r} in place: write x * 2, not x.mul_(2)"
            )


class _Unknown(KeyError):
    """A name that no slot or scalar has."""


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise _Unknown(name)


def _refuse_tensors(
    rule: Rule, tensors: tuple[Tensor, Tensor, Mapping[str, Tensor]], s: Mapping[str, float], error: Exception
) -> None:
    """Refuse an equation that fails with its scalars as they are, and would not if they were tensors."""
    scalars = {scalar: torch.tensor(value, dtype=torch.float64) for scalar, value in s.items()}
    try:
        rule.update(Fp32Arithmetic(), *tensors, scalars)
    except Exception:  # it is made for other shapes, perhaps
        return
    raise TypeError(f"the equation of rule {rule.name!r}, whose scalars are Python floats: {error}") from error


def _check_returned(what: str, returned: Any, weight: Tensor, slots: Sequence[str]) -> None:
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise ValueError(f"{what} must return a tensor and a dict of moments, got {type(returned).__name__}")
    made, moments = returned
    if sorted(moments) != sorted(slots):
        raise ValueError(f"{what} must return the moments {', '.join(slots)}, got {', '.join(moments) or 'none'}")
    for part, x in {"the update": made, **moments}.items():
        if not isinstance(x, Tensor) or x.shape != weight.shape or x.is_complex():
            shape = type(x).__name__
            if isinstance(x, Tensor):
                shape = "complex numbers" if x.is_complex() else str(tuple(x.shape))
            raise ValueError(
                f"{what} must return {part} in the parameter's shape {tuple(weight.shape)}, got {shape}"
            )
