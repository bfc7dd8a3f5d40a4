"""The passes of a bucket as one kernel each over all of its parameters: Triton's on a GPU, C on a CPU.

Eager torch takes some thirty passes over memory where these take one. They are the same bits as `EagerPasses`,
memory included. What is remembered is not written where gradients are encoded: whether a parameter's mean is finite
is known at the end only, and a backward pass that dies must leave it alone. At the end the gradients are still in
the buffer, what was remembered is where it was, and this rank's codes were kept, a byte an element: so what they
lost is worked out there, and there is no second copy of it in float32 between.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.distributed._compressed_memory import Memory
from narrowgauge.distributed._compressed_passes import EagerPasses, Passes, Task
from narrowgauge.distributed._compressed_wire import Wire, stream_of
from narrowgauge.kernels._c_library import Unavailable
from narrowgauge.kernels._c_messages import CMessages
from narrowgauge.kernels._message_kind import GRADIENTS, Kind, Numbers, Place
from narrowgauge.kernels._triton import unavailable

EAGER = "eager torch"


class BucketKernels(Protocol):
    """The three passes over a bucket's places; see `kernels._c_messages.CBucket`."""

    def encode(self, grads: Tensor, sent: Tensor, step: int) -> None: ...

    def add(self, received: Tensor, sent: Tensor, total: Tensor | None, step: int) -> None: ...

    def finish(self, grads: Tensor, sent: Tensor, received: Tensor, total: Tensor | None) -> None: ...


class Kernels(Protocol):
    """The passes of all buckets; see `kernels._c_messages.CMessages`."""

    def bucket(self, places: list[Place], numbers: Numbers, device: torch.device) -> BucketKernels: ...


class FusedPasses:
    """The passes of a bucket.

    Args:
        task: the bucket.
        kernels: what does them.
    """

    def __init__(self, task: Task, kernels: Kernels) -> None:
        self._task, self._kernels = task, kernels
        self._bytes, self._device = task.wire.nbytes(task.layout.width), task.buffer.device
        self._sent: Tensor
        self._total: Tensor | None = None

    def encode(self) -> Tensor:
        task = self._task
        self._sent = self._messages(task.layout.ranks)
        self._bucket().encode(task.buffer, self._sent, task.step)
        return self._sent

    def add(self, received: Tensor) -> Tensor:
        task, sent = self._task, self._messages(1)
        if task.memory is not None:
            self._total = torch.empty(task.layout.width, dtype=torch.float32, device=self._device)
        self._bucket().add(received, sent, self._total, task.step)
        return sent

    def finish(self, received: Tensor) -> None:
        buffer = self._task.buffer
        self._bucket().finish(buffer, self._sent, received, self._total)
        increment_version(buffer)

    def _messages(self, count: int) -> Tensor:
        return torch.empty((count, self._bytes), dtype=torch.uint8, device=self._device)

    def _bucket(self) -> BucketKernels:
        """The kernels, told where the parameters are; asked for at each pass, as a memory may be loaded between."""
        task, kernels = self._task, self._kernels
        memory, told = task.memory, task.layout.told
        moves = 0 if memory is None else memory.moves
        found: tuple[int, BucketKernels] | None = told.get((kernels, memory, task.rank))
        if found is None or found[0] != moves:
            numbers = Numbers(task.layout.ranks, task.rank, task.layout.width, task.wire.seed)
            bucket = kernels.bucket(self._places(), numbers, self._device)
            found = (0 if memory is None else memory.moves), bucket  # places are where errors have been moved to
            told[kernels, memory, task.rank] = found
        return found[1]

    def _places(self) -> list[Place]:
        memory, device = self._task.memory, self._device
        return [
            Place(
                piece.begin, piece.numel, piece.width, piece.column, stream_of(piece.key),
                0 if memory is None else memory.of(piece, device).data_ptr(),
            )
            for piece in self._task.layout.compressed
        ]  # fmt: skip


def passes_of(task: Task) -> Passes:
    """The fastest passes that there are for a bucket."""
    buffer = task.buffer
    found = kernels_of(task.wire, task.memory, buffer.dtype, buffer.device) if task.layout.compressed else ""
    plain = type(buffer) is Tensor and buffer.is_contiguous() and not buffer.is_neg()
    return EagerPasses(task) if isinstance(found, str) or not plain else FusedPasses(task, found)


def path_of(wire: Wire, memory: Memory | None, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """(what takes gradients of a dtype on a device, why nothing faster does)."""
    found = kernels_of(wire, memory, dtype, device)
    if isinstance(found, str):
        return EAGER, f"not fused: {found}"
    return ("fused C" if isinstance(found, CMessages) else "fused Triton"), ""


def kernels_of(wire: Wire, memory: Memory | None, dtype: torch.dtype, device: torch.device) -> Kernels | str:
    """The kernels for gradients of a dtype on a device, or why there are none."""
    return _kernels(wire, None if memory is None else memory.dtype, dtype, device)


@functools.lru_cache(maxsize=64)
def _kernels(wire: Wire, memory: torch.dtype | None, dtype: torch.dtype, device: torch.device) -> Kernels | str:
    if dtype not in GRADIENTS:
        return f"gradients of {dtype}"
    kind = Kind(
        wire.coder(torch.device("cpu")), wire.block_size, wire.bits, wire.rounding == "stochastic", dtype, memory
    )
    try:
        if device.type == "cpu":
            return CMessages(kind)
        why = unavailable(device)
        if why is not None:
            return why
        from narrowgauge.kernels._messages import TritonMessages  # which imports triton

        return TritonMessages(kind)
    except Unavailable as error:
        return str(error)
