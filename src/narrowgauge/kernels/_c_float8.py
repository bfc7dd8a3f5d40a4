"""Float8 weights on a CPU: codes and low words to float32, and words again.

The specification is `storage._float8_weight`, which these match bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from torch import Tensor

from narrowgauge.kernels._c_library import Unavailable, load, threads_for
from narrowgauge.kernels._c_source import source

_PARTS = ("words.h", "random.h", "float8_words.h")


@functools.cache
def unavailable() -> str | None:
    """Why there are no compiled functions; None if there are."""
    try:
        _library()
    except Unavailable as error:
        return str(error)
    return None


def read(codes: Tensor, low: Tensor, scale: float, weight: Tensor) -> None:
    """Write the float32 weights of codes and low words into a tensor; all are contiguous and of one size."""
    n = weight.numel()
    _library().read_float8(n, codes.data_ptr(), low.data_ptr(), scale, weight.data_ptr(), threads_for(n))


def write(
    weight: Tensor, scale: float, codes: Tensor, low: Tensor, *, seed: int, stream: int, step: int, purpose: int
) -> int:  # fmt: skip
    """Write codes and low words of float32 weights, rounded stochastically; all are contiguous and of one size.

    Args:
        weight, scale: what is rounded, and the value of the code 1.
        codes, low: where to.
        seed, stream, step, purpose: of the random bits, as `narrowgauge.formats.random_halves` takes them.

    Returns:
        The largest code that is a number, without sign.
    """
    n, mask = weight.numel(), 0xFFFFFFFF
    key = np.array([seed & mask, stream & mask, step & mask, step >> 32, 0, 0], dtype=np.uint32)
    largest: int = _library().write_float8(
        n, weight.data_ptr(), 1 / scale, key.ctypes.data, purpose, codes.data_ptr(), low.data_ptr(), threads_for(n)
    )
    return largest


@functools.cache
def _library() -> Any:
    library = load("\n".join(["#define BLOCK 1024", *map(source, _PARTS)]))
    address, long, real, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
    library.read_float8.argtypes = [long, address, address, real, address, integer]
    library.write_float8.argtypes = [long, address, real, address, ctypes.c_uint32, address, address, integer]
    library.read_float8.restype, library.write_float8.restype = None, integer
    return library
