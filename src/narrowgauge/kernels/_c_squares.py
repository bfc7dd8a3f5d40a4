"""One pass over a list of gradients on a CPU: the sum of squares of each, and its largest magnitude."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.kernels._c_library import Unavailable, load, threads_for
from narrowgauge.kernels._c_source import FLOATS, source

_STRETCH = 4096  # elements that one sum is of


def sums_of_squares(grads: Sequence[Tensor]) -> tuple[NDArray[np.float64], NDArray[np.float32]] | None:
    """(sums of squares, largest magnitudes), an entry for each gradient.

    A sum is inf or NaN if the gradient has one. None if one of them has no compiled function: no compiler, another
    device or dtype, a subclass, strides.
    """
    if not all(map(_is_plain, grads)):
        return None
    squares, peaks = np.zeros(len(grads)), np.zeros(len(grads), dtype=np.float32)
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        function = _function(dtype)
        if function is None:
            return None
        mine = [number for number, grad in enumerate(grads) if grad.dtype == dtype and grad.numel()]
        if not mine:
            continue
        sizes = np.array([grads[number].numel() for number in mine], dtype=np.int64)
        counts = -(-sizes // _STRETCH)
        firsts = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(mine), dtype=np.int64), counts)
        addresses = np.array([grads[number].data_ptr() for number in mine], dtype=np.int64)
        found: list[NDArray[Any]] = []
        for rows in (len(owners), len(mine)):
            found += [np.zeros(rows), np.zeros(rows, dtype=np.float32)]
        arrays = owners, firsts, sizes, addresses, *found
        function(len(owners), *(array.ctypes.data for array in arrays), threads_for(int(sizes.sum())))
        squares[mine], peaks[mine] = found[2:]
    return squares, peaks


def _is_plain(grad: Tensor) -> bool:
    plain = type(grad) in (Tensor, torch.nn.Parameter) and grad.is_cpu and grad.dtype in FLOATS
    return plain and grad.is_contiguous() and not grad.is_neg()


@functools.lru_cache(maxsize=8)
def _function(dtype: torch.dtype) -> Any:
    c_type, name = FLOATS[dtype]
    defined = (
        f"#define BLOCK 16\n#define STRETCH {_STRETCH}\n#define GRAD {c_type}\n#define GRAD_IS_{name.upper()}\n"
    )
    try:
        library = load("\n".join([defined, source("words.h"), source("squares.h")]))
    except Unavailable:
        return None
    function = library.sums_of_squares
    function.argtypes, function.restype = [ctypes.c_long, *[ctypes.c_void_p] * 8, ctypes.c_int], None
    return function
