"""Compiled steps of float8 weights on a CPU.

A parameter's step has three passes over memory: words to float32, the step of a float32 parameter by the compiled
function of any other (`CSteps`), and new words. One float32 tensor, up to twice as large as the largest parameter,
serves them all, one after the other.

The words are those of the eager step, bit for bit, where the float32 weights are. Where every step is measured, the
eager step is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels import _c_float8
from narrowgauge.kernels._codec import weight_purpose
from narrowgauge.optim._c_backend import CSteps, kernel_of
from narrowgauge.optim._plan import ParamPlan, ParamStep, State, moments_of
from narrowgauge.optim._sharding import Rows
from narrowgauge.optim._verdict import GradientReport, Verdict
from narrowgauge.storage import Float8Weight, weight_storage
from narrowgauge.storage._float8_weight import next_scale

_RELEASED = torch.empty(0)  # keeps no gradient alive between steps


def unsupported(plan: ParamPlan, param: Tensor, group: Mapping[str, Any]) -> str | None:
    """Why a float8 weight is not stepped so, whatever its gradient and state; None if it is."""
    if not isinstance(param, Float8Weight) or not (param.is_whole and param.is_contiguous()):
        return f"a {type(param).__name__} that is not whole and contiguous"
    if plan.has_terms:
        return f"{plan.rule.name} sums over a Float8Weight"
    kernel = kernel_of(_wide(plan), group, param.dtype, False)
    return kernel if isinstance(kernel, str) else _c_float8.unavailable()


def _wide(plan: ParamPlan) -> ParamPlan:
    """The plan of the same parameter in float32."""
    return replace(plan, weight=weight_storage("plain"), kind=(torch.float32, plan.kind[1], False))


def _has_words(step: ParamStep) -> bool:
    """Whether codes and low words are as C expects them."""
    p = step.param
    return isinstance(p, Float8Weight) and p.is_cpu and p.is_whole and p.is_contiguous()


class Float8CSteps:
    """A `StepList`: the steps of float8 weights on a CPU. `steps` are those of the list that it can take.

    `wides` has float32 tensors of an optimizer's lists, by their sizes, of which no two lists use one at a time.
    """

    def __init__(self, steps: Sequence[ParamStep], scaled: bool, wides: dict[int, Tensor]) -> None:
        usable = _c_float8.unavailable() is None
        mine = [step for step in steps if usable and not step.plan.has_terms and _has_words(step)]
        most = max((step.param.numel() for step in mine), default=0)
        size = 1 << max(most - 1, 0).bit_length()  # few sizes, for lists of one parameter
        if size not in wides:
            wides[size] = torch.empty(size, device="cpu")
        self._wide = {step.index: wides[size][: step.param.numel()].view(step.param.shape) for step in mine}
        inner = [
            ParamStep(step.index, _wide(step.plan), step.group, self._wide[step.index], step.grad, step.state)
            for step in mine
        ]
        self._inner = CSteps(inner, scaled, False)
        taken = {step.index: step for step in self._inner.steps}
        self.steps = [step for step in mine if step.index in taken]
        self.watched = self.steps
        self._members = {step.index: (step, taken[step.index]) for step in self.steps}

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        for (_, inner), grad, state in zip(self._members.values(), grads, states, strict=True):
            inner.grad, inner.state = grad, state
        return all(map(_has_words, self.steps)) and self._inner.refresh(grads, states)

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        return self._inner.inspect(verdict)

    def terms(self, verdict: Verdict) -> list[Rows]:
        return []  # no rule of these parameters has any

    def run(
        self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None
    ) -> list[tuple[list[str], Tensor]]:
        for index in self._members if indices is None else indices:
            step, inner = self._members[index]
            weight = step.param
            assert isinstance(weight, Float8Weight)
            _c_float8.read(weight.codes, weight.low, float(weight.scale), inner.param)
            before = float(step.state["step"])
            self._inner.run(verdict, False, [index])
            inner.grad = _RELEASED
            if float(step.state["step"]) != before:  # else the step was skipped
                self._write(step, weight, inner.param)
        return []

    def _write(self, step: ParamStep, weight: Float8Weight, wide: Tensor) -> None:
        scale = next_scale(weight.largest.to(torch.int32), weight.scale)
        largest = _c_float8.write(
            wide, float(scale), weight.codes, weight.low,
            seed=step.group["seed"], stream=step.plan.index, step=int(step.state["step"]),
            purpose=weight_purpose(moments_of(step.plan.slots)),
        )  # fmt: skip
        weight.scale.copy_(scale)
        weight.largest.fill_(largest)
        if not weight.is_inference():
            increment_version([weight])
