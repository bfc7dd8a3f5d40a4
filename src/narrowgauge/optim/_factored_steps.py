"""Steps of parameters whose second moment is stored as row means and column means (`factored`).

Kernels treat every element by itself, and a mean needs all of a row. So the moment is written out in float32 for
the time of a step. Kernels step it as one that is stored so, and then its means are taken. Adafactor divides by the
product of the *new* means: these are worked out before the kernels, which are given the product in place of the
moment and do not change it. Small parameters are written out together, a large one alone. On a CPU that takes 12
bytes an element: four for the moment, eight for the sums of its means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._eager import Fp32Arithmetic, next_number, numbers, with_gradient
from narrowgauge.optim._plan import ParamPlan, ParamStep, SlotPlan, State
from narrowgauge.optim._sharding import Rows
from narrowgauge.optim._verdict import GradientReport, Measured, StepList, Verdict, inspect_gradients
from narrowgauge.rules import HasSecondMoment, Rule, Scalar
from narrowgauge.storage import state_storage
from narrowgauge.storage._factored import FactoredState, factors, product

_AT_ONCE = 1 << 24  # elements that are written out at a time, if they are of several parameters


def written_out(plan: ParamPlan, group: Mapping[str, Any]) -> ParamPlan | None:
    """A plan for kernels, with factored moments in float32; None if it has none or kernels cannot be given them."""
    if plan.strict or plan.shard is not None or not any(map(_is_factored, plan.slots)):
        return None
    rule = _for_kernels(plan.rule, plan.slots, tuple(plan.rule.scalars(numbers(group, torch.device("cpu")), 1)))
    if rule is None:
        return None
    wide = state_storage("fp32")
    return replace(
        plan, rule=rule, slots=tuple(replace(s, storage=wide) if _is_factored(s) else s for s in plan.slots)
    )


def _is_factored(slot: SlotPlan) -> bool:
    return isinstance(slot.storage, FactoredState)


class _Asked(Exception):
    """Ends an update that reads a moment as the product of its new means."""


class _Asking(Fp32Arithmetic):
    def factored(self, slot: str, average: Tensor, least: Scalar) -> Tensor:
        raise _Asked


@functools.lru_cache(maxsize=256)
def _for_kernels(rule: Rule, slots: tuple[SlotPlan, ...], names: tuple[str, ...]) -> Rule | None:
    """The rule that kernels take: itself, or `Rule.given_factors` of one that reads the product of new means."""
    if any(slot.normalizer is not None and _is_factored(slot.normalizer) for slot in slots):
        return None  # it is in units of the moment as it is stored
    one = torch.ones(1, 1, device="cpu")
    scalars: dict[str, Scalar] = dict.fromkeys((*names, "elements"), 0.5)
    moments = {slot.slot.name: one for slot in slots}
    try:
        scalars |= dict.fromkeys(rule.terms(Fp32Arithmetic(), one, one, moments, scalars), 0.5)
        rule.update(_Asking(), one, one, moments, scalars)
    except _Asked:
        return rule.given_factors
    except Exception:  # a rule is anybody's, and may not expect such numbers
        return None
    return rule


@dataclass(frozen=True)
class _Keeping(Fp32Arithmetic):
    """Remembers the means that a rule reads the product of; averages are written over."""

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def accumulate_square(self, average: Tensor, x: Tensor, decay: Scalar, new_weight: Scalar) -> Tensor:
        return average.mul_(decay).add_((new_weight * x).mul_(x))

    def factored(self, slot: str, average: Tensor, least: Scalar) -> Tensor:
        self.means[slot] = factors(average)
        return product(*self.means[slot], least)


class FactoredSteps:
    """A `StepList`: the steps of parameters with factored moments, each with a plan that is `written_out`.

    Args:
        steps: the list, on one device.
        lists: makes the lists of backends for steps that are written out. They last for one step.
        eager: makes a list of eager steps. A CUDA graph, which cannot take new lists, captures its steps.
    """

    reads_steps = True

    def __init__(
        self,
        steps: Sequence[ParamStep],
        lists: Callable[[list[ParamStep]], list[StepList]],
        eager: Callable[[list[ParamStep]], StepList],
    ) -> None:
        self.steps, self.watched, self._lists_of, self._eager = steps, steps, lists, eager
        found = {step.index: written_out(step.plan, step.group) for step in steps}
        self._plans = {index: plan for index, plan in found.items() if plan is not None}

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        return all(
            grad.layout == torch.strided and step.param.dtype == step.plan.kind[0]
            for step, grad in zip(self.steps, grads, strict=True)
        )

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        return [inspect_gradients(self.steps, verdict)]

    def terms(self, verdict: Verdict) -> list[Rows]:
        return []  # no rank shares these parameters

    def run(self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None) -> Measured:
        mine = [step for step in self.steps if indices is None or step.index in indices]
        if mine and mine[0].param.is_cuda and torch.cuda.is_current_stream_capturing():
            eager = self._eager(mine)
            if verdict is not None:
                eager.inspect(verdict)
            return eager.run(verdict)
        found: Measured = []
        for some in _some_at_a_time(mine):
            counts = [step.state["step"].clone() for step in some]
            taken = [_write_out(step, self._plans[step.index], verdict) for step in some]
            for one in self._lists_of([step for step, _ in taken]):
                if verdict is not None:
                    one.inspect(verdict)
                found += one.run(verdict)
            for step, count, (wide, means) in zip(some, counts, taken, strict=True):
                _bring_back(step, step.state["step"] != count, wide.state, means)
        return found


def _some_at_a_time(steps: Sequence[ParamStep]) -> Iterator[list[ParamStep]]:
    some: list[ParamStep] = []
    for step in steps:
        if some and sum(one.param.numel() for one in some) + step.param.numel() > _AT_ONCE:
            yield some
            some = []
        some.append(step)
    if some:
        yield some


def _write_out(
    step: ParamStep, plan: ParamPlan, verdict: Verdict | None
) -> tuple[ParamStep, dict[str, tuple[Tensor, Tensor]]]:
    """A step whose factored moments are written out, and the new means where they are known already, by slot."""
    state, arithmetic = dict(step.state), _Keeping()
    for slot in filter(_is_factored, step.plan.slots):
        wide = slot.decode(state, step.param.shape)
        if plan.rule is not step.plan.rule:
            grad = with_gradient(step, verdict).grad.to(torch.float32)
            scalars = step.plan.rule.scalars(numbers(step.group, grad.device), next_number(step))
            assert isinstance(step.plan.rule, HasSecondMoment)
            _, wide = step.plan.rule.second_moment(arithmetic, step.param, grad, wide, scalars)
        for _, key in slot.keys:
            del state[key]
        state[slot.slot.name] = wide
    return replace(step, plan=plan, state=state), arithmetic.means


def _bring_back(step: ParamStep, took: Tensor, wide: State, means: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Store the means, if the parameter took its step: its count has grown then."""
    if took.is_cpu and not took:
        return
    for slot in filter(_is_factored, step.plan.slots):
        rows, columns = means.get(slot.slot.name) or factors(wide[slot.slot.name])
        for key, x in slot.keyed({"rows": rows, "columns": columns}).items():
            kept = step.state[key]
            kept.copy_(x if took.is_cpu else torch.where(took, x, kept))
