"""One parameter's step, in eager torch: the specification that every kernel has to match.

Decode what is stored, evaluate the rule, encode what comes out. Nothing is written here: the caller gets the new
tensors and decides, so that a step can be refused after the fact without a copy of what was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import random_bits, random_halves
from narrowgauge.optim._arithmetic import Fp32Arithmetic, StrictArithmetic, narrow_scalars, widest
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._shards import whole_of
from narrowgauge.rules import Scalar, squared_ratio

_FP32 = Fp32Arithmetic()
Updated = tuple[Tensor, dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Noise:
    """The random numbers of one parameter's step: a pure function of these, with nothing to save.

    Attributes:
        seed: the optimizer's.
        stream: the parameter's place.
        step: the number of this step; a 0-d tensor on the device, or a number.
        p: the parameter, for its shape and device; of a shared one what lies here.
        origin: where its random numbers begin, a multiple of eight.
    """

    seed: int
    stream: int
    step: int | Tensor
    p: Tensor
    origin: int = 0

    def words(self) -> Tensor:
        """A random 32-bit word an element, for the weight."""
        bits = random_bits(
            self.p.numel(), seed=self.seed, stream=self.stream, step=self.step, offset=self.origin,
            device=self.p.device,
        )  # fmt: skip
        return bits.view(self.p.shape)

    def halves(self, slot: int) -> Tensor:
        """16 random bits an element, for the state of a slot, counted from 1."""
        halves = random_halves(
            self.p.numel(), seed=self.seed, stream=self.stream, step=self.step, purpose=slot, offset=self.origin,
            device=self.p.device,
        )  # fmt: skip
        return halves.view(self.p.shape)


def update(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
    noise: Noise,
    summed: Mapping[str, Scalar] | None = None,
) -> Updated:
    """Compute a step without taking it.

    Args:
        plan: what to compute and how things are kept.
        p, grad: the parameter and its gradient.
        state: the parameter's state.
        group: its hyperparameters.
        step: the number of this step, from 1; a 0-d tensor on the device, or a number.
        noise: makes random numbers in p's shape.
        summed: the sums of the rule's terms over the whole parameter (see `term_sums`), where this is not all.

    Returns:
        (p, state, delta): the new parameter, its new state entries, and the intended update.
    """
    low = state[plan.weight_key] if plan.weight_key is not None else None
    read = _read(plan, p, grad, state, group, step)
    scalars = _with_sums(plan, read, summed)
    delta, moments = plan.rule.update(read.arithmetic, read.weight, read.grad, read.moments, scalars)
    if plan.strict:
        delta = delta.to(read.kept)
        new_p, new_low = plan.weight.add_rounded(p, low, delta, noise.words)
        new_state = {k: v for s in plan.slots for k, v in s.keyed(moments[s.slot.name][1]).items()}
    else:
        # Beside a device's numbers, which are of double precision, what has no dimensions becomes so, too.
        moments = {name: moment.to(torch.float32) for name, moment in moments.items()}
        new_state = _encode(plan, moments, noise)
        handed = _handed_over(plan, read.weight, moments, new_state, scalars)
        # Nothing is added where nothing is handed over: a zero would take the sign off another.
        delta = (delta if handed is None else delta + handed).to(torch.float32)
        new_p, new_low = plan.weight.add(p, low, read.weight, delta, noise.words)
    if plan.weight_key is not None and new_low is not None:
        new_state[plan.weight_key] = new_low
    return new_p, new_state, delta


def next_moments(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
    noise: Noise,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, Scalar]]:
    """The moments of a step before they are encoded, their new words, and the equation's scalars.

    Args: as of `update`. Not for strict arithmetic, in which moments have no other form than their words.
    """
    read = _read(plan, p, grad, state, group, step)
    scalars = _with_sums(plan, read)
    _, moments = plan.rule.update(read.arithmetic, read.weight, read.grad, read.moments, scalars)
    moments = {name: moment.to(torch.float32) for name, moment in moments.items()}
    return moments, _encode(plan, moments, noise), scalars


def numbers(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
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


@dataclass(frozen=True)
class _Read:
    """What a rule is given: `kept` is the dtype of the weight as it was read."""

    arithmetic: Fp32Arithmetic | StrictArithmetic
    weight: Tensor
    kept: torch.dtype
    grad: Tensor
    moments: Mapping[str, Any]
    scalars: Mapping[str, Scalar]


def _read(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
) -> _Read:
    low = state[plan.weight_key] if plan.weight_key is not None else None
    scalars: Mapping[str, Scalar] = plan.rule.scalars(numbers(group, p.device), step)
    if not plan.strict:
        decoded = {s.slot.name: s.decode(state, p.shape) for s in plan.slots}
        arithmetic = _FP32 if plan.shard is None else Fp32Arithmetic(plan.shard)
        return _Read(arithmetic, plan.weight.read(p, low), torch.float32, grad.to(torch.float32), decoded, scalars)
    moments: dict[str, Any] = {s.slot.name: (s.storage, s.words(state)) for s in plan.slots}
    weight = plan.weight.operand(p, low)
    dtype = widest([weight, *(word for _, words in moments.values() for word in words.values())])
    scalars = narrow_scalars(scalars, plan.rule.averaging, dtype, p.device)
    return _Read(
        StrictArithmetic(dtype, plan.shard), weight.to(dtype), weight.dtype, grad.to(dtype), moments, scalars
    )


def squared_ratios(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
) -> Tensor | None:
    """The squares of the gradient over the second moment that a step divides by; None for rules without one.

    Args: as of `update`, before it.
    """
    read = _read(plan, p, grad, state, group, step)
    return squared_ratio(plan.rule, read.arithmetic, read.weight, read.grad, read.moments, read.scalars)


def term_sums(
    plan: ParameterPlan,
    p: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: Scalar,
) -> dict[str, Tensor]:
    """The sums of the rule's terms, by name: 0-d, float64; of what lies here. Args: as of `update`, before it."""
    return _term_sums(plan, _read(plan, p, grad, state, group, step))


def _term_sums(plan: ParameterPlan, read: _Read) -> dict[str, Tensor]:
    terms = plan.rule.terms(read.arithmetic, read.weight, read.grad, read.moments, read.scalars)
    return {name: term.to(torch.float64).sum() for name, term in terms.items()}


def _with_sums(
    plan: ParameterPlan, read: _Read, summed: Mapping[str, Scalar] | None = None
) -> Mapping[str, Scalar]:
    """The scalars, and the sums over the parameter that the rule asks for."""
    sums = _term_sums(plan, read) if summed is None else summed
    if not sums:
        return read.scalars
    elements = float(whole_of(read.weight, plan.shard))
    return {
        **read.scalars,
        **{name: read.arithmetic.total(one) for name, one in sums.items()},
        "elements": elements,
    }


def _encode(plan: ParameterPlan, moments: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
    """The moments' new words, by the state's keys."""
    state: dict[str, Tensor] = {}
    # What gives another its unit comes before it.
    for number, slot in sorted(enumerate(plan.slots, start=1), key=lambda pair: pair[1].beside is not None):
        random = noise.halves(number) if slot.storage.stochastic(slot.slot.signed) else None
        state |= slot.encode(moments[slot.slot.name], random, state)
    return state


def _handed_over(
    plan: ParameterPlan,
    weight: Tensor,
    moments: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Scalar],
) -> Tensor | None:
    """What the weight is given now because its moments' words cannot keep it for later; None for nothing."""
    slots = [slot for slot in plan.slots if slot.storage.hands_over(slot.slot.signed)]
    reach = plan.rule.reach(_FP32, weight, moments, scalars) if slots else {}
    handed: Tensor | None = None
    for slot in slots:
        name = slot.slot.name
        if name in reach:
            lost = moments[name] - slot.decode(state, weight.shape)
            # An infinite moment loses nothing that a weight could take.
            given = reach[name] * torch.where(torch.isfinite(lost), lost, 0.0)
            handed = given if handed is None else handed + given
    return handed
