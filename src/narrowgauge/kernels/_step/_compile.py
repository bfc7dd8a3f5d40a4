# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Text made into kernels.

Triton reads the source of what it compiles through `inspect`, which asks `linecache`: that is told the text under
the name of a file that does not exist.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
import triton.language as tl

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
    file = f"<narrowgauge {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {
        "__name__": f"{__name__}.{name}",
        "triton": triton,
        "tl": tl,
        "load": load,
        "store": store,
    }
    for module in (_floats, _packing, _random, _weights, _states, _blockwise, _signed, _gauges, _sampling):
        space |= {key: value for key, value in vars(module).items() if not key.startswith("__")}
    exec(compile(source, file, "exec"), space)
    return space[name]
