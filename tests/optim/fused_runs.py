"""The same steps by kernels and by the eager specification, and where they differ."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from float8_parameters import kept_as
from narrowgauge import optim
from narrowgauge.optim._c_backend import CSteps
from narrowgauge.optim._eager import Noise, update
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._plan import ParamStep, plan_param
from narrowgauge.optim._triton_backend import TritonSteps
from narrowgauge.rules import Rule, Slot

State = dict[str, Tensor]


class Kernels:
    """Steps of lists by Triton's kernels alone: in the lists of the step before if they still hold."""

    def __init__(self) -> None:
        self._steps: TritonSteps | None = None
        self._given: list[ParamStep] = []

    def __call__(self, given: Sequence[ParamStep]) -> list[ParamStep]:
        """Take a step; those that have no kernel, untouched."""
        same = len(given) == len(self._given) and all(
            a.plan is b.plan and a.param is b.param for a, b in zip(given, self._given, strict=True)
        )
        for mine, new in zip(self._given, given, strict=True) if same else ():
            mine.grad, mine.state, mine.group = new.grad, new.state, new.group
        columns = [step.grad for step in given], [step.state for step in given]
        if self._steps is None or not same or not self._steps.refresh(*columns):
            self._given = list(given)
            self._steps = TritonSteps(self._given)
            self._steps.upload()
        self._steps.run(None)
        return [given[position] for position in self._steps.left]


def by_c(given: Sequence[ParamStep]) -> None:
    """Take a step by C functions alone."""
    steps = CSteps(given, False, False)
    assert len(steps.steps) == len(given)
    steps.run(None)


def entries(optimizer: NarrowOptimizer) -> list[ParamStep]:
    """What the optimizer would step with now."""
    optimizer._replan()
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            plan, state = optimizer.plan_of(p), optimizer.state[p]
            if not state:
                state.update(plan.init(p, group))
            found.append(ParamStep(plan.index, plan, group, p, p.grad, state))
    return found


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str, seed: int = 0, weights: str = "plain"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    return [torch.nn.Parameter(kept_as(value, weights)) for value in values]


def twins(
    name: str, options: Mapping[str, Any], ps: list[Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], NarrowOptimizer, NarrowOptimizer]:
    """Pairs of parameters, an optimizer for the first of each and one for the second; both step eagerly."""
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    options = {"min_quantized_size": 0, **options}
    made = [getattr(optim, name)(some, **copy.deepcopy(options)) for some in (ps, qs)]
    for optimizer in made:
        optimizer._engine.backends = ()
    return list(zip(ps, qs, strict=True)), made[0], made[1]


class Keep(Rule):
    """Keeps the gradient as m and the weight as v; the weight moves by what was kept before."""

    name = "keep"
    moments = (Slot("m", signed=True, normalizer="v"), Slot("v", signed=False))

    def __init__(self, slots: str, shown: str) -> None:
        self._slots, self._shown = slots, shown

    def slots(self, group: Mapping[str, Any]) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.moments if slot.name in self._slots)

    def scalars(self, group: Mapping[str, Any], step: Any) -> dict[str, Any]:
        return {"lr": group["lr"]}

    def update(self, arithmetic: Any, weight: Tensor, grad: Tensor, moments: Any, s: Any) -> Any:
        new = {"m": grad * 1.0, "v": weight * 1.0 if "m" in self._slots else grad * 1.0}
        return moments[self._shown] * 1.0, {name: new[name] for name in moments}

    def remaining_effect(self, arithmetic: Any, weight: Tensor, moments: Any, s: Any) -> dict[str, Any]:
        return {"m": s["lr"]} if "m" in moments else {}


def kept(
    rule: Rule,
    states: Mapping[str, str],
    block: int,
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    compiled: bool = False,
    **options: Any,
) -> tuple[list[tuple[Tensor, State]], list[tuple[Tensor, State]]]:
    """(parameter, state) of each tensor after two steps with the same gradient: eager, and by kernels.

    The kernels are Triton's, or `compiled` C.
    """
    optimizer = optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    group = {**optimizer.param_groups[0], "states": dict(states), "block_size": block, "min_quantized_size": 0}
    group |= {"nonfinite": "propagate", **options}
    eager, fused = [], []
    for i, (weight, grad) in enumerate(zip(values, grads, strict=True)):
        plan = plan_param(rule, group, weight, str(i), i)
        for results in (eager, fused):
            p = weight.detach().clone()
            results.append(ParamStep(i, plan, group, p, grad.clone(), plan.init(p, group)))
    run = by_c if compiled else Kernels()
    for step in (1, 2):
        for e in eager:
            new_p, new_state, _ = update(e, step, Noise(group["seed"], e.plan.index, step, e.param))
            e.param.copy_(new_p)
            for key, value in new_state.items():
                e.state[key].copy_(value)
        with np.errstate(all="ignore"):  # the interpreter's numpy warns where floats do what they do
            run(fused)
    return [(e.param, dict(e.state)) for e in eager], [(e.param, dict(e.state)) for e in fused]
