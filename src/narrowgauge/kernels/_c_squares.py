"""One pass over a gradient on a CPU: how large it is, and whether it is finite."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.kernels._c_codecs import source
from narrowgauge.kernels._c_library import Unavailable, load

_PART = 4096
# Below, a thread costs more to wake than it saves.
_ELEMENTS_FOR_THREADS = 1 << 16
_KINDS = {
    torch.float32: ("float", "float32"),
    torch.bfloat16: ("u16", "bfloat16"),
    torch.float16: ("_Float16", "float16"),
}


def squares(grad: Tensor) -> tuple[float, float] | None:
    """(the sum of a gradient's squares, its largest magnitude), the former in float64 and inf or NaN if it has one.

    None where there is no compiled function for it: no compiler, another device, a subclass, strides.
    """
    plain = (
        type(grad) in (Tensor, torch.nn.Parameter) and grad.is_cpu and grad.is_contiguous() and not grad.is_neg()
    )
    if not plain or grad.dtype not in _KINDS or torch.compiler.is_compiling():
        return None
    function = _function(grad.dtype)
    if function is None:
        return None
    n = grad.numel()
    sums, peaks = np.zeros(-(-n // _PART)), np.zeros(-(-n // _PART), dtype=np.float32)
    threads = torch.get_num_threads() if n >= _ELEMENTS_FOR_THREADS else 1
    function(n, grad.data_ptr(), sums.ctypes.data, peaks.ctypes.data, threads)
    return float(sums.sum()), float(peaks.max(initial=0.0))


@functools.lru_cache(maxsize=8)
def _function(dtype: torch.dtype) -> Any:
    c_type, name = _KINDS[dtype]
    defined = f"#define BLOCK 16\n#define GRAD {c_type}\n#define GRAD_IS_{name.upper()}\n"
    try:
        function = load("\n".join([defined, source("words.h"), source("ahead.h"), source("squares.h")])).look
    except Unavailable:
        return None
    pointer = ctypes.c_void_p
    function.argtypes, function.restype = [ctypes.c_long, pointer, pointer, pointer, ctypes.c_int], None
    return function
