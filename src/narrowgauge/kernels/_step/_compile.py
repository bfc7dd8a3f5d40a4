# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""A step's text made into kernels: it has several, and its first call compiles them side by side."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from narrowgauge.kernels import _launches, _triton
from narrowgauge.kernels._codec import text_of
from narrowgauge.kernels._launches import CachedKernel, module_of
from narrowgauge.kernels._step import _codebooks, _float8_weights, _floats, _log_states, _packing, _stats, _weights

_HEAD_START = 0.3  # seconds
# A kernel, with grid, arguments, constants and options of a launch.
Compilation: TypeAlias = tuple[CachedKernel, tuple[int, ...], tuple[Any, ...], Any, Any]
_CALLED = ("_decode", "_encode", "_unusual", "_read", "_add", "_moved")  # ends of codecs' functions; see `_codecs`


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


@functools.lru_cache(maxsize=64)
def functions(texts: tuple[str | Path | None, ...] = ()) -> Mapping[str, Any]:
    """The functions that a step's text may call: those of this package, and of the files or texts of codecs.

    Raises:
        NotImplementedError: if a codec's function has the name of one of this package, or of another codec.
    """
    space: dict[str, Any] = {"triton": triton, "tl": tl, "load": load, "store": store}
    for module in (_floats, _packing, _weights, _float8_weights, _log_states, _codebooks, _stats):
        space |= {key: value for key, value in vars(module).items() if not key.startswith("__")}
    for text in dict.fromkeys(texts):
        for name, value in (_own(text_of(text)) if text else {}).items():
            if space.setdefault(name, value) is not value and name.endswith(_CALLED):
                raise NotImplementedError(f"a codec brings {name}, a name that the library or another codec has")
    return space


@functools.lru_cache(maxsize=64)
def _own(source: str) -> Mapping[str, Any]:
    """What a codec's text defines, the same each time."""
    space = functions()
    found = module_of(source, "codec", space, __name__)
    return {key: value for key, value in found.items() if not key.startswith("__") and value is not space.get(key)}


@functools.lru_cache(maxsize=256)
def compiled(source: str, name: str, texts: tuple[str | Path | None, ...] = ()) -> Any:
    """The kernel of that name in a text that calls `functions`; the same one for the same text."""
    return module_of(source, name, functions(texts), __name__)[name]


def compile_together(launches: Sequence[Compilation]) -> None:
    """Compile what launches would, each in a thread: much of a compilation runs outside of Python.

    So does what launches them, which Triton writes in C and compiles for each list of types. What runs in Python
    comes first, and takes turns: the kernel that takes longest, of the longest text, has a head start, in which it
    is over if it has been compiled before.

    Args:
        launches: of different kernels. On the current device.
    """
    wanted = [(one, *rest) for one, *rest in launches if not one.interpreted]
    if len(wanted) < 2:
        return
    longest, *others = sorted(wanted, key=lambda job: -len(getattr(job[0].kernel, "src", "")))
    getattr(longest[0].kernel, "cache_key", None)  # of all functions that it calls; kept
    _triton.wait()
    device = _launches.current_device()

    def work(
        one: CachedKernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any, options: Any
    ) -> None:
        with torch.cuda.device(device):  # a thread begins on the first
            made = one.kernel.warmup(*arguments, grid=grid, **constants, **options)
            getattr(made, "run", None)  # makes the launcher

    with ThreadPoolExecutor(len(wanted)) as pool:
        jobs = [pool.submit(work, *longest)]
        wait(jobs, _HEAD_START)
        for done in jobs + [pool.submit(work, *job) for job in others]:
            done.result()
