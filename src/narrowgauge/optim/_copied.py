"""Steps of tensors that kernels cannot read as they lie, channels-last weights of convolutions above all.

Kernels walk through a parameter in row-major order, as blocks of 8-bit states and random bits are defined. Tensors
in another order are copied for the time of one step: parameter and gradient, and states that are not contiguous
themselves. The kernels step the copies, and the results are copied back. Eager torch takes any strides, and many
times as long (docs/decisions/cpu-step-memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.optim._plan import PLAIN, ParamStep, State
from narrowgauge.optim._sharding import Rows
from narrowgauge.optim._verdict import GradientReport, Measured, StepList, Verdict


def is_scattered(step: ParamStep) -> bool:
    """Whether a step's tensors are plain ones of one device, and one of them is not contiguous."""
    tensors = [step.param, *step.tensors()]
    if not all(type(x) in PLAIN and x.device == step.param.device for x in tensors):
        return False
    return step.grad.shape == step.param.shape and not all(map(_lies_well, tensors))


def _lies_well(x: Tensor) -> bool:
    return x.is_contiguous() and not x.is_neg()


def _copy(x: Tensor) -> Tensor:
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return found.copy_(x.detach())


class CopiedSteps:
    """A `StepList`: the steps of parameters that must be copied.

    Args:
        steps: the list, each `is_scattered`.
        lists: makes the lists of backends for copies of them. They last for one step.
        eager: makes a list that needs no copies. A CUDA graph, which cannot take new lists, captures its steps.
    """

    reads_steps = True

    def __init__(
        self,
        steps: Sequence[ParamStep],
        lists: Callable[[list[ParamStep]], list[StepList]],
        eager: Callable[[list[ParamStep]], StepList],
    ) -> None:
        self.steps, self.watched, self._lists_of, self._eager = steps, steps, lists, eager
        self._copies: dict[int, ParamStep] = {}  # by index; there from an inspection to the step
        self._lists: list[StepList] = []

    def refresh(self, grads: Sequence[Tensor], states: Sequence[State]) -> bool:
        self._copies, self._lists = {}, []
        return all(
            grad.layout == torch.strided and step.param.dtype == step.plan.kind[0] and is_scattered(step)
            for step, grad in zip(self.steps, grads, strict=True)
        )

    def inspect(self, verdict: Verdict) -> list[GradientReport]:
        self._take_copies(self.steps)
        return [found for some in self._lists for found in some.inspect(verdict)]

    def terms(self, verdict: Verdict) -> list[Rows]:
        return [found for some in self._lists for found in some.terms(verdict)]

    def run(self, verdict: Verdict | None, summed: bool = False, indices: Sequence[int] | None = None) -> Measured:
        mine = [step for step in self.steps if indices is None or step.index in indices]
        if not self._copies:
            self._take_copies(mine)
        found: Measured = []
        for some in self._lists:
            own = [step.index for step in some.steps if indices is None or step.index in indices]
            if own:
                found += some.run(verdict, summed, own if indices is not None else None)
        for step in mine:
            _bring_back(self._copies.pop(step.index), step)
        if not self._copies:
            self._lists = []
        return found

    def _take_copies(self, steps: Iterable[ParamStep]) -> None:
        if self.steps[0].param.is_cuda and torch.cuda.is_current_stream_capturing():
            self._copies, self._lists = {step.index: step for step in steps}, [self._eager(list(steps))]
            return
        made = []
        for step in steps:
            state = {key: x if _lies_well(x) else _copy(x) for key, x in step.state.items()}
            made.append(replace(step, param=_copy(step.param), grad=_copy(step.grad), state=state))
        self._copies, self._lists = {step.index: step for step in made}, self._lists_of(made)


def _bring_back(copy: ParamStep, step: ParamStep) -> None:
    """Write what was stepped to the parameter and its state."""
    if copy is step:
        return
    step.param.copy_(copy.param)
    for key, x in step.state.items():
        if copy.state[key] is not x:
            x.copy_(copy.state[key])
