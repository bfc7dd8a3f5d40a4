# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""A step's text made into kernels: it has several, and its first call compiles them side by side."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl

from narrowgauge.kernels import _launches
from narrowgauge.kernels._launches import Launches
from narrowgauge.kernels._step import (
    _blockwise,
    _floats,
    _gauges,
    _packing,
    _random,
    _sampling,
    _signed,
    _states,
    _weights,
)
from narrowgauge.kernels._text import kernel_of


@triton.jit
def load(pointers, here, MASKED: tl.constexpr):
    # A masked load goes element by element: most tiles are whole and have none.
    if MASKED:
        return tl.load(pointers, mask=here, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def store(pointers, values, here, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values, mask=here)
    else:
        tl.store(pointers, values)


@functools.lru_cache(maxsize=256)
def compiled(source: str, name: str) -> Any:
    """The kernel of that name in a text; the same one for the same text."""
    space: dict[str, Any] = {"triton": triton, "tl": tl, "load": load, "store": store}
    for module in (_floats, _packing, _random, _weights, _states, _blockwise, _signed, _gauges, _sampling):
        space |= {key: value for key, value in vars(module).items() if not key.startswith("__")}
    return kernel_of(source, name, space, __name__)


def compile_together(launches: Sequence[tuple[Launches, tuple[int, ...], tuple[Any, ...], Any, Any]]) -> None:
    """Compile what launches would, each in a thread: much of a compilation runs outside of Python.

    Args:
        launches: of different kernels, each with the arguments of its call. On the current device.
    """
    wanted = [(one, *rest) for one, *rest in launches if not one.interpreted]
    if len(wanted) < 2:
        return
    device = _launches.current_device()

    def work(
        one: Launches, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any, options: Any
    ) -> None:
        with torch.cuda.device(device):  # a thread begins on the first
            one.kernel.warmup(*arguments, grid=grid, **constants, **options)

    with ThreadPoolExecutor(len(wanted)) as pool:
        for done in [pool.submit(work, *job) for job in wanted]:
            done.result()
