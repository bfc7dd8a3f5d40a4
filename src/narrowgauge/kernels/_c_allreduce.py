"""Passes of compressed gradients on a CPU: each one function in C over all parameters of a bucket."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels._allreduce_key import AllreduceKey, BucketNumbers, Place, table_of
from narrowgauge.kernels._c_library import Unavailable, load
from narrowgauge.kernels._c_source import FLOATS, source

_LANES = 16  # of the widest vectors
_MASK = 0xFFFFFFFF


class CAllreduce:
    """The three passes, compiled for a key.

    Raises:
        Unavailable: if there is no compiler, or it refuses.
    """

    def __init__(self, key: AllreduceKey) -> None:
        if (why := key.unsupported()) is not None:
            raise Unavailable(why)
        library = load(_source(key))
        self._arrays = (key.values, key.boundaries if key.table is None else key.table.entries)
        self._tables = (ctypes.c_void_p * 2)(*(array.ctypes.data for array in self._arrays))
        self._passes: list[Any] = [library.encode, library.add, library.finish]
        for function, tensors in zip(self._passes, (2, 3, 4), strict=True):
            function.argtypes, function.restype = [ctypes.c_void_p] * (3 + tensors), None

    def bucket(self, places: Sequence[Place], numbers: BucketNumbers, device: torch.device) -> CBucket:
        """The passes of a bucket on a device, until one of the parameters' places changes."""
        return CBucket(self, places, numbers)


class CBucket:
    """The three passes of a bucket."""

    def __init__(self, made: CAllreduce, places: Sequence[Place], numbers: BucketNumbers) -> None:
        self._passes, self._tables = made._passes, made._tables
        self._places = table_of(places)
        seed = numbers.seed & _MASK, numbers.seed >> 32 & _MASK
        self._numbers = (ctypes.c_long * 8)(len(places), numbers.ranks, numbers.rank, numbers.width, *seed)
        self._known = self._numbers, self._places.ctypes.data

    def encode(self, grads: Tensor, sent: Tensor, step: int) -> None:
        """Gradients plus residuals to a message for each rank.

        Args:
            grads: the bucket's buffer.
            sent: uint8 (ranks, bytes of a message); written.
            step: of random numbers.
        """
        self._set(step)
        self._passes[0](*self._known, grads.data_ptr(), sent.data_ptr(), self._tables)

    def add(self, received: Tensor, sent: Tensor, total: Tensor | None, step: int) -> None:
        """All ranks' messages to the sum's.

        Args:
            received: uint8 (ranks, bytes of a message).
            sent: uint8 (bytes of a message,); written.
            total: float32 (width,), the sum itself; written unless it is None.
            step: of random numbers.
        """
        self._set(step)
        address = None if total is None else total.data_ptr()
        self._passes[1](*self._known, received.data_ptr(), sent.data_ptr(), address, self._tables)

    def finish(self, grads: Tensor, sent: Tensor, received: Tensor, total: Tensor | None) -> None:
        """The sums' messages to means in the place of gradients; and the new residuals.

        Args:
            grads, sent, total: what `encode` and `add` were given and wrote.
            received: uint8 (ranks, bytes of a message), of the sums.
        """
        self._set(0)
        address = None if total is None else total.data_ptr()
        given = grads.data_ptr(), sent.data_ptr(), received.data_ptr(), address
        self._passes[2](*self._known, *given, self._tables)

    def _set(self, step: int) -> None:
        self._numbers[6], self._numbers[7] = step & _MASK, torch.get_num_threads()


def _source(key: AllreduceKey) -> str:
    lowest, table = key.coder.lowest, key.table
    grad, grad_name = FLOATS[key.dtype]
    defined = {
        "SIZE": key.block,
        "BLOCK": -(-key.block // _LANES) * _LANES,
        "BITS": key.bits,
        "VALUES": len(key.coder.values),
        "STOCHASTIC": int(key.stochastic),
        "SEARCHED": int(table is None),
        "KIND": "ABSOLUTE" if lowest == -1 else "SIGNED",
        "GRAD": grad, "FROM_GRAD": f"from_{grad_name}", "TO_GRAD": f"to_{grad_name}",
    }  # fmt: skip
    if table is not None:
        defined |= {"ZERO": table.zero, "FIRST": table.first}
    if key.residual is not None:
        residual, name = FLOATS[key.residual]
        defined |= {"ERROR": residual, "FROM_ERROR": f"from_{name}", "TO_ERROR": f"to_{name}"}
    files = ("words.h", "random.h", "lookup.h", "codebook.h", "allreduce.h")
    return "\n".join([*(f"#define {name} {value}" for name, value in defined.items()), *map(source, files)])
