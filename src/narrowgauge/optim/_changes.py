"""What changed since the previous step: the options of a group, and where tensors are in memory.

A GPU steps three hundred parameters in a millisecond, and Python needs as long to plan that step. So a step first
checks whether anything changed since the last plan, in loops that run in C: about twenty reads per parameter.

These changes are found: other parameters, gradients or groups; tensors at other addresses (replaced, moved, `.data`
swapped); other dtypes and layouts of parameters and gradients; other sizes of parameters; other options of a group.
A state's tensor of another dtype or size at the very same address is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import NoneType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from narrowgauge.kernels._c_addresses import StateAddresses, look
from narrowgauge.storage import Float8Weight

# Options of a group with the storages of single parameters, by the name of a parameter: under KEPT those that the
# optimizer was made with, under STORAGES those that `convert` chose later. A change is found if the dictionary is
# replaced by another, and not if it is changed in place.
KEPT, STORAGES = "kept", "storages"
LISTS = ("params", "param_names", KEPT, STORAGES)  # entries of a group that rules do not read
_CONSTANTS = (float, int, bool, str, NoneType)

T = TypeVar("T")


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


class GroupSnapshot:
    """A group's options at one time. An option that can change in place (tensor, list) always counts as changed."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._names, self._values = list(group), list(group.values())
        options = {name: value for name, value in group.items() if name not in LISTS}
        self._dicts = {name: dict(value) for name, value in options.items() if type(value) is dict}
        parts: Iterable[Any] = (tuple(v.values()) if type(v) is dict else v for v in options.values())
        parts = chain.from_iterable(part if type(part) is tuple else (part,) for part in parts)
        self._constant = all(type(part) in _CONSTANTS for part in parts)

    def unchanged(self, group: Mapping[str, Any]) -> bool:
        """Whether the group certainly has the same options."""
        if not self._constant or len(group) != len(self._values):
            return False
        if not all(map(is_, group.values(), self._values)) or list(group) != self._names:
            return False
        return all(group[name] == known for name, known in self._dicts.items())


class OfGroup(Generic[T]):
    """A value that is computed from a group, and computed again if an option may have changed."""

    def __init__(self, group: Mapping[str, Any], work_out: Callable[[Mapping[str, Any]], T]) -> None:
        self.group, self._work_out = group, work_out
        self._snapshot, self.found = GroupSnapshot(group), work_out(group)

    def current(self) -> T:
        """What it is now: the same object if nothing has changed."""
        if not self._snapshot.unchanged(self.group):
            self._snapshot, self.found = GroupSnapshot(self.group), self._work_out(self.group)
        return self.found


class TensorSnapshot:
    """Addresses, dtypes and layouts of a list of parameters, and of their gradients and states. Keeps neither
    gradients nor states alive.

    `gradients` has the gradients' addresses; it is None if one has none.
    """

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._params = tuple(params)
        self._in_parts = Float8Weight in map(type, params)
        self.gradients: npt.NDArray[np.int64] | None = None
        tensors = self._all(grads)
        self._first = len(tensors) - len(grads)  # of the gradients among them
        try:
            self._where, self._kinds = look(tensors)
            self._negated = list(map(Tensor.is_neg, grads))
            self._states = StateAddresses(tuple(states))
        except (RuntimeError, TypeError):  # a sparse gradient, or none
            return
        self.gradients = self._where[self._first :]

    def unchanged(self, grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether all is as it was. Gradients may have moved by multiples of 16 bytes; `gradients` follows them."""
        if self.gradients is None:
            return False
        try:
            # A gradient of another size may be given the memory of the one before.
            where, kinds = look(self._all(grads))
            # Some gradients through complex numbers are views that are negated when they are read.
            if kinds != self._kinds or list(map(Tensor.is_neg, grads)) != self._negated:
                return False
        except (RuntimeError, TypeError):
            return False
        if not self._states.hold(tuple(states)):
            return False
        if not np.array_equal(where, self._where):
            moved = where != self._where
            if moved[: self._first].any() or ((where ^ self._where) & 15).any():
                return False
            self._where, self.gradients = where, where[self._first :]
        return True

    def _all(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Parameters and gradients; the memory of a Float8Weight is that of what it consists of."""
        if not self._in_parts:
            return (*self._params, *grads)
        parts = ((p.codes, p.low, p.numbers) if isinstance(p, Float8Weight) else (p,) for p in self._params)
        return (*chain.from_iterable(parts), *grads)
