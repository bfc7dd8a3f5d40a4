"""What a step finds as the one before found it: groups' options, and where tensors lie.

A step of three hundred parameters takes a GPU a millisecond, and Python as long to say what it has said before. So
that is asked first, column by column, in loops that the interpreter runs by itself: some twenty looks a parameter.

Noticed are: other parameters, gradients or groups, tensors that lie elsewhere (replaced, moved, `.data` swapped),
other dtypes, sizes and layouts of parameters and gradients, and every option. Not noticed is a state's tensor that
somebody replaced by hand with one of another dtype or size at the very same address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import NoneType
from typing import Any

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
    """Where a list of parameters, their gradients and their states lie, and as what; keeps none of them alive."""

    def __init__(
        self, ps: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._found = _weights(ps), _gradients(grads), _words(states)

    def holds(self, ps: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether all of it is still so; gradients may lie elsewhere."""
        weights, gradients, words = self._found
        return _gradients(grads) == gradients and _weights(ps) == weights and _words(states) == words


def addresses(tensors: Iterable[Tensor]) -> list[int] | None:
    """Where tensors lie in memory; None if one of them has no such place."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except (RuntimeError, TypeError):  # sparse, or no tensor at all
        return None


def _weights(ps: Sequence[Tensor]) -> tuple[Any, ...]:
    marks = [getattr(p, MARK, None) for p in ps]
    whole = list(map(Tensor.is_contiguous, ps))
    return list(map(Tensor.data_ptr, ps)), list(map(_DTYPE, ps)), whole, list(map(Tensor.numel, ps)), marks


def _gradients(grads: Sequence[Tensor]) -> Any:
    try:
        return list(map(type, grads)), list(map(_DTYPE, grads)), list(map(Tensor.is_contiguous, grads))
    except RuntimeError:  # some sparse ones
        return object()


def _words(states: Sequence[Mapping[str, Tensor]]) -> Any:
    found = addresses(chain.from_iterable([state.values() for state in states]))
    # An object that equals no other: what lies nowhere is looked at anew each time.
    return (found, list(map(len, states))) if found is not None else object()
