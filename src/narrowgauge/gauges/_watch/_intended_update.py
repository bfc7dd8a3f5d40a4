"""The update that one of torch's optimizers intended, from what it leaves behind.

torch's Adam, AdamW, SGD and Adagrad leave everything that their update was made of: the gradient, and the moments
after the step. This library's rules, with an arithmetic that does not average the moments again, compute the update
once more: on tensors in float64, or as graphs that a kernel is written from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge import rules
from narrowgauge.gauges._watch._batched_rows import to_device
from narrowgauge.kernels._graph import Node, Recorder

_SHAPE = (2, 3)


class AfterStep:
    """The arithmetic of a rule after its step, in float64: moments are averaged already, and only read."""

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

    def factored(self, slot: str, average: Tensor, least: rules.Scalar) -> Tensor:
        return average

    def root(self, x: Tensor, by: rules.Scalar) -> Tensor:
        return (x / by).sqrt()


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> rules.Rule | None:
    """The rule of one of torch's optimizers; None for all others, subclasses too."""
    kind = type(optimizer)
    if kind is torch.optim.AdamW or (kind is torch.optim.Adam and group.get("decoupled_weight_decay")):
        return rules.ADAMW
    return {torch.optim.Adam: rules.ADAM, torch.optim.SGD: rules.SGD, torch.optim.Adagrad: rules.ADAGRAD}.get(kind)


def moments_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The moments of one of torch's optimizers, by the rules' letters."""
    keys = {"m": "exp_avg", "v": "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"}
    if "sum" in state:
        keys = {"v": "sum"}
    elif state.get("momentum_buffer") is not None:
        keys = {"m": "momentum_buffer"}
    return {slot: state[key] for slot, key in keys.items() if key in state}


def scalars_of(
    rule: rules.Rule, group: Mapping[str, Any], states: Sequence[Mapping[str, Any]], device: torch.device
) -> dict[str, rules.Scalar]:
    """A rule's scalars at the step that was taken.

    Numbers where the host knows them and they are equal for all parameters, else float64 on the device: 0-d, or
    (parameters,).
    """
    return rule.scalars(numbers_of(group), _steps(states, device))


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters; tensors on a device as float64."""

    def number(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.item() if value.device.type == "cpu" else value.detach().to(torch.float64).reshape(())
        return tuple(map(number, value)) if isinstance(value, tuple | list) else value

    return {key: number(value) for key, value in group.items() if key != "params"}


def _steps(states: Sequence[Mapping[str, Any]], device: torch.device) -> rules.Scalar:
    steps = [state.get("step", 1.0) for state in states]
    if not any(isinstance(step, Tensor) and step.device.type != "cpu" for step in steps):
        numbers = [float(step) for step in steps]
        if len(set(numbers)) == 1:
            return numbers[0]
        return to_device(numbers, device, np.float64)
    if len({(step.device, step.dtype) if isinstance(step, Tensor) else None for step in steps}) > 1:
        steps = [torch.as_tensor(step).to(device, torch.float64) for step in steps]
    return torch.stack([step.reshape(()) for step in steps]).to(device, torch.float64)


def table_of(scalars: Mapping[str, rules.Scalar], count: int, device: torch.device) -> Tensor:
    """Scalars as rows of a table: float64 (1, scalars), or (count, scalars) if some are tensors."""
    values = list(scalars.values())
    known = [0.0 if isinstance(value, Tensor) else value for value in values]
    row = to_device([known], device, np.float64)
    if not any(isinstance(value, Tensor) for value in values):
        return row
    columns = [
        (value if isinstance(value, Tensor) else column).to(torch.float64).expand(count)
        for value, column in zip(values, row[0].unbind(), strict=True)
    ]
    return torch.stack(columns, dim=1)


@functools.lru_cache(maxsize=64)
def update_graph(rule: rules.Rule, slots: tuple[str, ...], scalars: tuple[str, ...]) -> Node:
    """The update as a graph of ``"weight"``, ``"grad"`` and the moments after the step, in float64."""
    record, weight, grad, s = _begin(scalars)
    moments = {slot: record.element(slot) for slot in slots}
    with torch.no_grad(), record:
        delta, _ = rule.update(AfterStep(), weight, grad, moments, s)
    return record.node(delta)


@functools.lru_cache(maxsize=64)
def ratio_graph(rule: rules.Rule, scalars: tuple[str, ...]) -> Node | None:
    """`rules.squared_ratio` as a graph of ``"grad"`` and ``"v"`` after the step; None without a second moment."""
    record, weight, grad, s = _begin(scalars)
    v = record.element("v")
    with torch.no_grad(), record:
        ratio = rules.squared_ratio(rule, AfterStep(), weight, grad, {"v": v}, s)
    return record.node(ratio) if ratio is not None else None


def _begin(scalars: tuple[str, ...]) -> tuple[Recorder, Tensor, Tensor, dict[str, rules.Scalar]]:
    record = Recorder(_SHAPE, torch.float64)
    return record, record.element("weight"), record.element("grad"), {name: record.number(name) for name in scalars}
