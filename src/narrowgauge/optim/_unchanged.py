"""What a step finds as the one before found it: groups' options, and where tensors lie.

A step of three hundred parameters takes a GPU a millisecond, and Python as long to say what it has said before. So
that is asked first, column by column, in loops that the interpreter runs by itself: some twenty looks a parameter.

Noticed are: other parameters, gradients or groups, tensors that lie elsewhere (replaced, moved, `.data` swapped),
other dtypes and layouts of parameters and gradients, other sizes of parameters, and every option. Not noticed is
what somebody puts by hand at the very same address: another dtype or size of a state's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor

from narrowgauge.storage._marks import MARK

# Lists, not settings, of a group.
_LISTS = ("params", "param_names")
_CONSTANTS = (float, int, bool, str, NoneType)
_DTYPE = attrgetter("dtype")


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


class Settled:
    """A group's options at one time, to be told from what they are later.

    Values that can change in place (tensors, lists, mappings) are taken to have changed.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._names, self._values = list(group), list(group.values())
        parts: Iterable[Any] = (value for name, value in group.items() if name not in _LISTS)
        parts = chain.from_iterable(part if type(part) is tuple else (part,) for part in parts)
        self._constant = all(type(part) in _CONSTANTS for part in parts)

    def holds(self, group: Mapping[str, Any]) -> bool:
        """Whether nothing can have changed since."""
        if not self._constant or len(group) != len(self._values):
            return False
        return all(map(is_, group.values(), self._values)) and list(group) == self._names


class Seen:
    """Where a list of parameters, their gradients and their states lie, and as what; keeps none of them alive.

    Attributes:
        gradients: their addresses; None if one has none.
    """

    def __init__(
        self, ps: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._weights, self._forms, self._words = _weights(ps), _forms(grads), _words(states)
        found = addresses(grads)
        self.gradients = np.array(found, dtype=np.int64) if found is not None else None
        self._found, self._offsets = found, self.gradients & 15 if self.gradients is not None else None

    def holds(self, ps: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether all of it is still so. Gradients may have moved by whole 16 bytes, and are noted then."""
        found = addresses(grads)
        if found is None or self._offsets is None:
            return False
        if _forms(grads) != self._forms or _weights(ps) != self._weights or _words(states) != self._words:
            return False
        if found != self._found:
            moved = np.array(found, dtype=np.int64)
            if (moved & 15 != self._offsets).any():
                return False
            self._found, self.gradients = found, moved
        return True


def addresses(tensors: Iterable[Tensor]) -> list[int] | None:
    """Where tensors lie in memory; None if one of them has no such place."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, TypeError):  # sparse, or no tensor at all
        return None


def _weights(ps: Sequence[Tensor]) -> tuple[Any, ...]:
    marks = [getattr(p, MARK, None) for p in ps]
    # A gradient of another size may be given the memory of the one before.
    sizes, contiguous = list(map(Tensor.numel, ps)), list(map(Tensor.is_contiguous, ps))
    return addresses(ps), sizes, list(map(_DTYPE, ps)), contiguous, marks


def _forms(grads: Sequence[Tensor]) -> Any:
    try:
        # Some gradients through complex numbers are views that are negated when they are read.
        return list(map(_DTYPE, grads)), list(map(Tensor.is_contiguous, grads)), list(map(Tensor.is_neg, grads))
    except RuntimeError:  # some sparse ones
        return object()  # equals no other


def _words(states: Sequence[Mapping[str, Tensor]]) -> Any:
    try:
        found = list(map(Tensor.data_ptr, chain.from_iterable(map(dict.values, states))))  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        return object()
    return found, list(map(len, states))
