"""What a step did to every parameter, measured around optimizers that do not measure it themselves.

Before a due step the weights, or a sample of the long ones, are copied; after it the change is compared with
what was intended. torch's Adam, AdamW, SGD and Adagrad leave all that their update was made of: the gradient,
and the moments after the step. Their update is worked out from these once more, in float64, by this library's
rules. Of any other optimizer only the change is known: its norm, and where a gradient that is not zero moved
nothing.

The sums are those of `narrowgauge.optim.UpdateStats`: the squared norm of the intended update, its dot products
with the stored and with the visible effective one (the same here), how many intended updates are not zero, how
many of those changed nothing stored, nothing visible, and the sum of g^2 / max(v_hat, eps^2) and its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge import rules
from narrowgauge.gauges._segments import Segments, chunks, flat, kept_sample, sample

SUMS = 8


class After:
    """The arithmetic of a rule whose moments have been averaged already: they are read, in float64."""

    def accumulate(self, average: Tensor, x: Tensor, decay: rules.Scalar, share: rules.Scalar) -> Tensor:
        return average

    def accumulate_square(self, average: Tensor, x: Tensor, decay: rules.Scalar, share: rules.Scalar) -> Tensor:
        return average

    def square(self, x: Tensor) -> Tensor:
        return x.square()

    def of_whole(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    def value(self, average: Tensor) -> Tensor:
        return average

    def root(self, x: Tensor, by: rules.Scalar) -> Tensor:
        return (x / by).sqrt()


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> rules.Rule | None:
    """The rule that one of torch's optimizers follows; None for all others, subclasses too."""
    kind = type(optimizer)
    if kind is torch.optim.AdamW or (kind is torch.optim.Adam and group.get("decoupled_weight_decay")):
        return rules.ADAMW
    return {torch.optim.Adam: rules.ADAM, torch.optim.SGD: rules.SGD, torch.optim.Adagrad: rules.ADAGRAD}.get(kind)


def moments_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The moments that torch keeps, by the rules' letters."""
    second = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    keys = {"m": "exp_avg", "v": second}
    if "sum" in state:
        keys = {"v": "sum"}
    elif state.get("momentum_buffer") is not None:
        keys = {"m": "momentum_buffer"}
    return {slot: state[key] for slot, key in keys.items() if key in state}


@dataclass(frozen=True, eq=False)
class _Alike:
    """Parameters that one equation serves: of one group and device, with the same moments.

    Attributes:
        group: theirs.
        rule: None where it is not known.
        ps: the parameters.
    """

    group: Mapping[str, Any]
    rule: rules.Rule | None
    ps: list[Tensor]


class MeasuredStep:
    """One step of an optimizer, from before to after.

    Args:
        optimizer: the optimizer.
        turn: which sample of long tensors is taken.
        share: one row of so many, or 1 for every element.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, turn: int, share: int) -> None:
        self._optimizer, self._turn, self._share = optimizer, turn, share
        # torch's SGD with Nesterov's momentum steps lists of parameters ("foreach") by adding to their gradients.
        self._grads = {
            p: self._sample(dense(p.grad)).clone()
            for group in optimizer.param_groups
            for p in group["params"]
            if group.get("nesterov") and p.grad is not None
        }
        # By torch's GradScaler, for optimizers that skip on the device.
        self._held: Tensor | None = getattr(optimizer, "found_inf", None)
        self._before = {
            p: kept_sample(flat(p), self._turn, self._share)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def _sample(self, x: Tensor) -> Tensor:
        return sample(flat(x), self._turn, self._share)

    def after(self) -> list[tuple[list[Tensor], Tensor, str]]:
        """Parameters, their sums (parameters, 8) in float64, and how they were measured: by "rule", or
        "difference".
        """
        return [
            (some.ps, self._sums(some), "rule" if some.rule is not None else "difference") for some in self._alike()
        ]

    def _alike(self) -> list[_Alike]:
        found: dict[tuple[Any, ...], _Alike] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            rule = rule_of(self._optimizer, group)
            for p in group["params"]:
                if p not in self._before or p.grad is None or p.is_complex():
                    continue
                state = self._optimizer.state.get(p, {})
                slots = moments_of(group, state) if rule is not None else {}
                needed = {slot.name for slot in rule.slots(group)} if rule is not None else set()
                known = rule if needed == set(slots) else None  # a parameter that was not stepped has none
                found.setdefault((number, p.device, known, tuple(slots)), _Alike(group, known, [])).ps.append(p)
        lists = list(found.values())
        parts = [(some, chunks([self._before[p].numel() for p in some.ps])) for some in lists]
        return [_Alike(some.group, some.rule, some.ps[cut]) for some, cuts in parts for cut in cuts]

    def _sums(self, some: _Alike) -> Tensor:
        vectors = [self._before[p] for p in some.ps]
        segments = Segments.of(vectors)
        before = segments.rows(vectors, torch.float64)
        change = segments.rows([self._sample(p) for p in some.ps], torch.float64) - before
        grads = [self._grads[p] if p in self._grads else self._sample(dense(p.grad)) for p in some.ps]
        grad = segments.rows(grads, torch.float64)
        if some.rule is None:
            sums = _of_change(segments, grad, change)
        else:
            sums = self._of_rule(some, segments, before, change, -grad if some.group.get("maximize") else grad)
        if self._held is not None:
            held = torch.as_tensor(self._held).to(sums.device).reshape(()) > 0
            sums = torch.where(held, 0.0, sums)
        whole = [flat(p).numel() for p in some.ps]
        scale = [n / max(1, kept) for n, kept in zip(whole, segments.lengths, strict=True)]
        if any(factor != 1 for factor in scale):
            factors = torch.tensor(scale, dtype=torch.float64, device="cpu").to(sums.device, non_blocking=True)
            sums = sums * factors[:, None]
        return sums

    def _of_rule(self, some: _Alike, segments: Segments, before: Tensor, change: Tensor, grad: Tensor) -> Tensor:
        assert some.rule is not None
        states = [self._optimizer.state.get(p, {}) for p in some.ps]
        kept = [moments_of(some.group, state) for state in states]
        moments = {
            slot: segments.rows([self._sample(one[slot]) for one in kept], torch.float64) for slot in kept[0]
        }
        scalars = some.rule.scalars(numbers_of(some.group), steps_of(states, segments))
        intended, _ = some.rule.update(After(), before, grad, moments, scalars)
        # Behind the end of a vector an eps of 0 would divide by it.
        inside = segments.inside()
        intended = torch.where(inside, intended, 0.0)
        nonzero = intended.abs() > 0
        lost = nonzero & ~(change.abs() > 0)
        dot = intended * change
        columns = [intended.square(), dot, dot, nonzero, lost, lost]
        ratio = None
        if "v" in moments:
            ratio = rules.squared_ratio(some.rule, After(), before, grad, moments, scalars)
        if ratio is None:
            columns += [torch.zeros_like(nonzero)] * 2
        else:
            columns += [torch.where(inside, ratio, 0.0), inside.expand_as(ratio)]
        return segments.sums(columns)


def _of_change(segments: Segments, grad: Tensor, change: Tensor) -> Tensor:
    moved = grad.abs() > 0
    lost = moved & ~(change.abs() > 0)
    nothing = torch.full_like(change[:, :1], math.nan)  # the intended update is not known
    none = torch.zeros_like(moved)
    return segments.sums([change.square(), nothing, nothing, moved, lost, lost, none, none])


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.layout is not torch.strided else grad


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters; those that are tensors in float64, where they are."""

    def number(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.item() if value.device.type == "cpu" else value.detach().to(torch.float64).reshape(())
        return tuple(map(number, value)) if isinstance(value, tuple | list) else value

    return {key: number(value) for key, value in group.items() if key != "params"}


def steps_of(states: Sequence[Mapping[str, Any]], segments: Segments) -> rules.Scalar:
    """The number of the step that was taken: one for all where the host knows that, else a column (rows, 1)."""
    steps = [state.get("step", 1.0) for state in states]
    if not any(isinstance(step, Tensor) and step.device.type != "cpu" for step in steps):
        numbers = [float(step) for step in steps]
        if len(set(numbers)) == 1:
            return numbers[0]
        column = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(segments.device, non_blocking=True)
    else:
        column = torch.stack([torch.as_tensor(step).to(segments.device, torch.float64) for step in steps])
    return segments.spread(column)
