"""What an optimizer shows to gauges: a parameter before its next step, and what the step will make of its moments.

A step stores only the codes of its new moments. So `preview` computes them once more, by the specification that the
kernels match; `moment_quality` what storing them changes in a step; and `SecondMoment` the ratios of gradient and
second moment, of which RMS_t is the root mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch_private import local
from narrowgauge.optim._eager import (
    Noise,
    Operands,
    encode_moments,
    next_number,
    operands,
    squared_ratios,
    with_gradient,
    with_sums,
)
from narrowgauge.optim._plan import ParamPlan, ParamStep
from narrowgauge.optim._sharding import local_gradient
from narrowgauge.optim._tracing import elementwise
from narrowgauge.rules import Scalar, bare

_SAMPLE = 2**16  # elements of a parameter that `moment_quality` computes


@dataclass(frozen=True, eq=False)
class ParameterView:
    """A parameter, its gradient and its state; of a sharded one the local shards.

    Attributes:
        plan, state, group: its plan, its state (empty before its first step) and its hyperparameters.
        whole: the parameter, as the optimizer's groups have it.
        clipping: what the last step multiplied gradients by because of `max_grad_norm`, after unscaling: 0-d; None
            without a limit, or before the first step.
    """

    plan: ParamPlan
    whole: Tensor
    state: Mapping[str, Tensor]
    group: Mapping[str, Any]
    clipping: Tensor | None

    @property
    def p(self) -> Tensor:
        """The parameter, or its local shard."""
        return local(self.whole)

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, or the local shard of it; None without one."""
        found: Tensor | None = local_gradient(self.whole, self.whole.grad)
        return found

    def second_moment(self, sample: Callable[[Tensor], Tensor]) -> SecondMoment | None:
        """A copy of a sample, before a step; None if the parameter is empty or its rule has no second moment."""
        plan, some = self.plan, sample(self.p)
        slot = next((slot for slot in plan.slots if slot.slot.name == "v"), None)
        if slot is None or not self.p.numel():
            return None
        state = dict(self.state)
        if state:
            keys = {*(key for _, key in slot.keys), plan.weight_key}
            state = {key: sample(x).clone() for key, x in state.items() if key in keys or key == "step"}
        else:
            state = plan.init(some, self.group)
        plan = replace(plan, slots=(slot,))
        return SecondMoment(ParamStep(plan.index, plan, self.group, some.clone(), torch.empty(0), state))


@dataclass(frozen=True, eq=False)
class SecondMoment:
    """A sample of a parameter before a step: weight and second moment, with no gradient yet."""

    before: ParamStep

    @property
    def elements(self) -> int:
        """Elements of the sample."""
        return self.before.param.numel()

    def ratio_sums(self, after: ParameterView, grad: Tensor, inverse: Tensor | None) -> Tensor | None:
        """The sum of g^2 / max(v_hat, eps^2) in the step, and the number of its terms: float64 (2,).

        Zeros if the step was not taken; None if the rule has no such ratio. `after` is the parameter after the
        step, `grad` the sample of its gradient, `inverse` the inverse loss scale.
        """
        before = self.before
        grad = grad.reshape(before.param.shape).to(torch.float32)
        for factor in (inverse, after.clipping):
            grad = grad if factor is None else grad * factor.to(grad.device, non_blocking=grad.is_cuda)
        step = with_gradient(replace(before, grad=grad), None)
        found = squared_ratios(step, next_number(step))
        if found is None:
            return None
        total = found.sum(dtype=torch.float64)
        sums = torch.stack([total, torch.full_like(total, found.numel())])
        return (
            torch.where(after.state["step"] > before.state["step"], sums, 0.0)
            if after.state
            else torch.zeros_like(sums)
        )


@dataclass(frozen=True, eq=False)
class QuantizedMoment:
    """A moment as a step computes it, and as it is stored.

    Attributes:
        slot: the equation's letter.
        format: the storage's name.
        exact: float32, in the parameter's shape, or flat if it is a sample.
        codes: uint8, in the same shape, one a byte.
        kept: what the codes stand for, float32, in the same shape.
        fed_back: whether the weight is given what storing the moment loses.
        correction: the bias correction that the equation divides the moment by; 1 without one.
        eps: what the equation adds to the root of the second moment; None in rules without bias correction.
    """

    slot: str
    format: str
    exact: Tensor
    codes: Tensor
    kept: Tensor
    fed_back: bool
    correction: Scalar
    eps: float | None

    def dequantize(self) -> Tensor:
        """What the codes stand for."""
        return self.kept


def preview(
    view: ParameterView, inverse: Tensor | None, sample: Callable[[Tensor], Tensor]
) -> list[QuantizedMoment]:
    """The quantized moments that the next step will make of a parameter with a gradient.

    Args:
        view: the parameter.
        inverse: the inverse loss scale that the step multiplies gradients by; None without one.
        sample: gives the items of a tensor in a sample of whole blocks; not used for rules with sums over a tensor.
    """
    plan, p, read, scalars, moments, new = _computed(view, inverse, sample)
    feeds = any(slot.storage.error_feedback for slot in plan.slots) and not plan.strict
    effect = plan.rule.remaining_effect(read.arithmetic, read.weight, moments, scalars) if feeds else {}
    corrections = {"m": scalars.get("correction1", 1.0), "v": scalars.get("correction2", 1.0)}
    return [
        QuantizedMoment(
            slot=slot.slot.name,
            format=slot.storage.name,
            exact=moments[slot.slot.name],
            codes=slot.storage.codes(slot.tensors(new), p.shape),
            kept=slot.decode(new, p.shape),
            fed_back=slot.storage.error_feedback and slot.slot.name in effect,
            correction=corrections.get(slot.slot.name, 1.0),
            eps=float(scalars["eps"]) if "correction1" in scalars else None,
        )
        for slot in plan.slots
        if slot.storage.quantized
    ]


@torch.no_grad()
def moment_quality(view: ParameterView, inverse: Tensor | None) -> dict[str, Tensor]:
    """What storing a moment makes of a step: by slot, sums whose ratio is a quality as `UpdateStats` has it.

    Of each quantized moment, two updates with the present gradient are compared: with all moments as the next step
    computes them, and with this one as it is stored. Their dot product, over the squared norm of the first, is 1 if
    nothing is lost in the mean. A moment whose error the weight is given (error feedback) is left out. Of a long
    parameter blocks here and there are computed, and gradients are clipped as in the last step.

    Returns:
        By slot, float64 (2,): the dot product, and the squared norm; of a sharded parameter those of this rank.
    """
    factors = [x.to(view.p.device) for x in (inverse, view.clipping) if x is not None]
    inverse = math.prod(factors[1:], start=factors[0]) if factors else None
    plan, p, read, scalars, moments, new = _computed(view, inverse, _blocks_of(view))
    slots = [slot for slot in plan.slots if slot.storage.quantized and not slot.storage.error_feedback]

    def step(moments: Mapping[str, Tensor]) -> Tensor:
        delta, _ = plan.rule.update(read.arithmetic, read.weight, read.grad, moments, scalars)
        return delta.to(torch.float64)

    exact, found = step(moments), {}
    for slot in slots:
        kept = step({**moments, slot.slot.name: slot.decode(new, p.shape)})
        found[slot.slot.name] = torch.stack([(kept * exact).sum(), exact.square().sum()])
    return found


def _blocks_of(view: ParameterView) -> Callable[[Tensor], Tensor]:
    """What gives some whole blocks of a tensor of the parameter or its state, `_SAMPLE` elements or less."""
    n, block = view.p.numel(), max(slot.block_size for slot in view.plan.slots)
    stride = -(-n // _SAMPLE)

    def sample(x: Tensor) -> Tensor:
        if stride == 1 or block % 2 or not x.dim():
            return x
        x = x.reshape(-1) if x.numel() == n else x
        items = {n: block, -(-n // 2): block // 2, -(-n // block): 1}[len(x)]
        return x[: n // block * items].reshape(n // block, items, *x.shape[1:])[::stride].flatten(0, 1)

    return sample


def _computed(
    view: ParameterView, inverse: Tensor | None, sample: Callable[[Tensor], Tensor]
) -> tuple[ParamPlan, Tensor, Operands, Mapping[str, Scalar], dict[str, Tensor], dict[str, Tensor]]:
    """(plan, p, what the rule is given, its scalars, its new moments, their state entries), of a sample."""
    plan, p, grad, group = view.plan, view.p, view.grad, view.group
    assert grad is not None
    plan = replace(plan, rule=bare(plan.rule))  # the options around it change no moment
    state = dict(view.state) or plan.init(p, group)
    if elementwise(plan, group):
        keys = {*(key for slot in plan.slots for _, key in slot.keys), plan.weight_key}
        p, grad = sample(p), sample(grad)
        state = {key: sample(x) if key in keys else x for key, x in state.items()}
    if inverse is not None:
        grad = grad.to(torch.float32) * inverse.to(grad.device)
    step = with_gradient(ParamStep(plan.index, plan, group, p, grad, state), None)
    number = next_number(step)
    read = operands(step, number)
    scalars = with_sums(plan, read)
    _, made = plan.rule.update(read.arithmetic, read.weight, read.grad, read.moments, scalars)
    moments = {name: moment.to(torch.float32) for name, moment in made.items()}
    new, _ = encode_moments(plan, moments, Noise(group["seed"], plan.index, number, p))
    return plan, p, read, scalars, moments, new
