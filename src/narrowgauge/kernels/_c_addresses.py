"""Where hundreds of tensors are in memory, read in C where there is a compiler.

A step asks for the addresses of all that kernels will read and write, and whether all is what it was, to find out
what was replaced. Python needs a tenth of a microsecond for each answer, and gives it as an object; a loop in C
takes a tenth of that time. It calls torch's C interface for models that were compiled ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge._torch_private import tensor_interface
from narrowgauge.kernels._c_library import Unavailable, load
from narrowgauge.kernels._c_source import source

_DTYPE = attrgetter("dtype")


def look(tensors: tuple[Tensor, ...]) -> tuple[NDArray[np.int64], Any]:
    """(addresses, what else kernels rely on) of tensors: of each its size, dtype, and whether it is contiguous.

    The second equals that of others, which were looked at in the same process, if they are alike. In C nothing but
    tensors may be given.

    Raises:
        RuntimeError: for a tensor that has no address.
    """
    library = reader()
    if library is not None:
        found, kinds = np.empty(len(tensors), dtype=np.int64), np.empty((len(tensors), 2), dtype=np.int64)
        if library.of_tensors(tensors, len(tensors), _interface(), found.ctypes.data, kinds.ctypes.data):
            return found, kinds.tobytes()
    where = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
    return where, [list(map(ask, tensors)) for ask in (Tensor.numel, _DTYPE, Tensor.is_contiguous)]


class StateAddresses:
    """Where the tensors of states were. Keeps none of them alive.

    Args:
        states: a dict of tensors for each parameter.

    Raises:
        RuntimeError, TypeError: if something in them has no address.
    """

    def __init__(self, states: tuple[Mapping[str, Tensor], ...]) -> None:
        tensors = _in_order(states)
        self._ends = _ends(states)
        self._known = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
        self._now = np.empty_like(self._known)
        self._recognize(tensors)

    def _recognize(self, tensors: list[Tensor]) -> None:
        self._objects = _identities(tensors)
        if self._objects is not None:
            where = self._ends.ctypes.data, self._objects.ctypes.data, Tensor, self._now.ctypes.data
            self._given = len(self._ends), _interface(), *where

    def hold(self, states: tuple[Mapping[str, Tensor], ...]) -> bool:
        """Whether all tensors are where they were."""
        library = reader() if self._objects is not None else None
        if library is not None and len(states) == len(self._ends) and library.of_states(states, *self._given):
            return np.array_equal(self._now, self._known)
        try:
            tensors = _in_order(states)
            now = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
        except (RuntimeError, TypeError):
            return False
        if not np.array_equal(now, self._known) or not np.array_equal(_ends(states), self._ends):
            return False
        self._recognize(tensors)  # other objects, at the same addresses
        return True


def _in_order(states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    return list(chain.from_iterable(map(dict.values, states)))  # type: ignore[arg-type]


def _ends(states: Sequence[Mapping[str, Tensor]]) -> NDArray[np.int64]:
    """Where each state's tensors end among all."""
    return np.cumsum(list(map(len, states)), dtype=np.int64)


def _identities(tensors: list[Tensor]) -> NDArray[np.int64] | None:
    """Those of plain tensors; None if there are others.

    A new object may have the identity of one that is gone, so C looks at its type, too.
    """
    if any(type(tensor) is not Tensor for tensor in tensors):
        return None
    return np.array(list(map(id, tensors)), dtype=np.int64)


@functools.lru_cache(maxsize=1)
def reader() -> ctypes.PyDLL | None:
    """The functions of `addresses.h`, called with the interpreter locked; None without compiler or interface."""
    if tensor_interface() is None:
        return None
    try:
        library = load(source("addresses.h"))
    except Unavailable:
        return None
    locked = ctypes.PyDLL(None, handle=library._handle)
    pointer, number, anything = ctypes.c_void_p, ctypes.c_long, ctypes.py_object
    locked.of_tensors.argtypes = [anything, number, pointer, pointer, pointer]
    locked.of_states.argtypes = [anything, number, pointer, pointer, pointer, anything, pointer]
    return locked


@functools.lru_cache(maxsize=1)
def _kept_interface() -> NDArray[np.int64]:
    return np.array(tensor_interface() or (), dtype=np.int64)


@functools.lru_cache(maxsize=1)
def _interface() -> int:
    """Where the `struct torch` is."""
    return int(_kept_interface().ctypes.data)
