# mypy: disable-error-code="import-not-found,import-untyped"
"""Descriptors for the engine that copies blocks of matrices into shared memory (TMA, from Hopper on)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Describer:
    """Descriptors of contiguous matrices of one shape and dtype, for the engine that copies blocks of them.

    Triton's launcher has the driver encode each descriptor at each launch. An encoded one says where a matrix is
    and how it lies, nothing else: it holds for every matrix of this shape at that address, and is kept.

    Args:
        matrix: one of them, with rows of a multiple of 16 bytes, at an address that is one; checked.
        block: sides of what is copied at once.
    """

    _MOST = 4096  # addresses; a training has the same few at every step

    def __init__(self, matrix: Tensor, block: list[int]) -> None:
        self._fields = dict(vars(TensorDescriptor.from_tensor(matrix, block)), base=None)
        self._told: Mapping[str, Any] | None = None
        self._encoded: dict[int, tuple[Any, ...]] = {}

    def __call__(self, matrix: Any) -> Any:
        """The descriptor of a matrix as Triton takes it."""
        made = object.__new__(TensorDescriptor)
        made.__dict__.update(self._fields, base=matrix)
        return made

    def encoded(self, address: int, told: Mapping[str, Any]) -> tuple[Any, ...]:
        """That of the matrix at an address as the function in C takes it, by what a compiled kernel tells of it."""
        if told is not self._told or len(self._encoded) >= self._MOST:
            self._told, self._encoded = told, {}
        found = self._encoded.get(address)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg  # there where a launcher is told of it

            found = self._encoded[address] = tuple(make_tensordesc_arg(self(_At(address)), told))
        return found


class _At:
    """What is asked of a matrix to encode its descriptor."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def encoded_by(launch: Any) -> tuple[Any, list[Mapping[str, Any]]] | None:
    """Behind a launcher that encodes descriptors: the function in C that it calls, and what it is told of each."""
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "launcher" not in names or "tensordesc_meta" not in names:
        return None
    found = dict(zip(names, (cell.cell_contents for cell in launch.__closure__), strict=True))
    told = found["tensordesc_meta"]
    return None if None in told else (found["launcher"], told)
