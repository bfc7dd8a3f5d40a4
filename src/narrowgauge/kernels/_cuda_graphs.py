"""What a CUDA graph reads at its replays, kept until the graph is destroyed.

torch does not say when that is. CUDA does: a user object that a graph owns is destroyed with the last graph that
was made of it (CUDA driver API, "User Objects"). Its destructor runs in a thread of the driver, perhaps while
Python ends, so it must not be Python: it is `sem_post` of the C library, and the semaphore is read here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the only reference
_NO_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, the only flag there is
_SEMAPHORE = 64  # bytes, enough for any C library's
_kept: list[tuple[int | None, Any]] = []


def keep_for_graph(value: Any) -> None:
    """Keep a value until the graph that the current stream is being captured in is destroyed.

    Where CUDA does not say when that is, as on AMD's GPUs, it is kept until the program ends.
    """
    _kept.append((_semaphore_of_graph(), value))


def release_destroyed() -> int:
    """Let go of what was kept for graphs that are destroyed; how many values are kept still.

    Not to be called during a capture: torch then cannot tell when pinned memory may be used again.
    """
    if _kept:
        _kept[:] = [(semaphore, one) for semaphore, one in _kept if semaphore is None or not _posted(semaphore)]
    return len(_kept)


def _posted(semaphore: int) -> bool:
    """Whether a semaphore was posted; both take the address of it."""
    value = ctypes.c_int()
    ctypes.CDLL(None).sem_getvalue(ctypes.c_void_p(semaphore), ctypes.byref(value))
    return value.value > 0


def _semaphore_of_graph() -> int | None:
    """The address of a semaphore that is posted when the graph being captured is destroyed; None if none can be."""
    if torch.version.cuda is None:
        return None
    try:
        cuda, c = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
        info, create, retain = cuda.cuStreamGetCaptureInfo_v2, cuda.cuUserObjectCreate, cuda.cuGraphRetainUserObject
    except (OSError, AttributeError):
        return None
    status, graph, owned = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if info(stream, ctypes.byref(status), None, ctypes.byref(graph), None, None) or not graph:
        return None
    c.malloc.restype = ctypes.c_void_p
    semaphore = c.malloc(ctypes.c_size_t(_SEMAPHORE))  # never freed: the driver may post it at the program's end
    c.sem_init(ctypes.c_void_p(semaphore), 0, 0)
    post = ctypes.cast(c.sem_post, ctypes.c_void_p)
    if create(ctypes.byref(owned), ctypes.c_void_p(semaphore), post, 1, _NO_SYNC):
        return None
    return None if retain(graph, owned, 1, _MOVE) else int(semaphore)
