"""Hyperparameters on their way to a kernel: which are numbers, and which decide what is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim._unchanged import Settled


@dataclass(frozen=True)
class Options:
    """A group's hyperparameters: names and values of the numbers, and all that decides what to compute."""

    names: tuple[str, ...]
    numbers: tuple[Any, ...]
    others: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Options:
        numbers: dict[str, Any] = {}
        others: list[tuple[str, Any]] = []
        for name, value in group.items():
            if isinstance(value, tuple) or (isinstance(value, list) and name != "params"):
                if all(map(_is_number, value)):
                    numbers |= {f"{name}.{i}": _number(x) for i, x in enumerate(value)}
            elif isinstance(value, bool | str | None):
                others.append((name, value))
            elif _is_number(value):
                numbers[name] = _number(value)
        return cls(tuple(numbers), tuple(numbers.values()), tuple(others))


class Group:
    """A group's hyperparameters, worked out anew where one of them may have changed."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.group = group
        self._settled = Settled(group)
        self._options = Options.of(group)

    def options(self) -> Options:
        if not self._settled.holds(self.group):
            self._settled, self._options = Settled(self.group), Options.of(self.group)
        return self._options


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    """A number of the host, or the tensor that holds it on the device."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.item() if value.device.type == "cpu" else value


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
