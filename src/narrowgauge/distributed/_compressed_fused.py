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


class Kernels(Protocol):
    """The three passes over a list of places; see `kernels._c_messages.CMessages`."""

    def encode(self, places: list[Place], numbers: Numbers, grads: Tensor, sent: Tensor) -> None: ...

    def add(
        self, places: list[Place], numbers: Numbers, received: Tensor, sent: Tensor, total: Tensor | None
    ) -> None: ...

    def finish(
        self, places: list[Place], numbers: Numbers, grads: Tensor, sent: Tensor, received: Tensor,
        total: Tensor | None,
    ) -> None: ...  # fmt: skip


class FusedPasses:
    """The passes of a bucket.

    Args:
        task: the bucket.
        kernels: what does them.
    """

    def __init__(self, task: Task, kernels: Kernels) -> None:
        self._task, self._kernels = task, kernels
        layout = task.layout
        self._numbers = Numbers(layout.ranks, task.rank, layout.width, task.wire.seed, task.step)
        self._bytes = task.wire.nbytes(layout.width)
        self._sent: Tensor
        self._total: Tensor | None = None

    def encode(self) -> Tensor:
        self._sent = self._messages(self._task.layout.ranks)
        self._kernels.encode(self._places(), self._numbers, self._task.buffer, self._sent)
        return self._sent

    def add(self, received: Tensor) -> Tensor:
        task, sent = self._task, self._messages(1)
        if task.memory is not None:
            self._total = torch.empty(task.layout.width, dtype=torch.float32, device=sent.device)
        self._kernels.add(self._places(), self._numbers, received, sent, self._total)
        return sent

    def finish(self, received: Tensor) -> None:
        buffer, total = self._task.buffer, self._total
        self._kernels.finish(self._places(), self._numbers, buffer, self._sent, received, total)
        increment_version(buffer)

    def _messages(self, count: int) -> Tensor:
        return torch.empty((count, self._bytes), dtype=torch.uint8, device=self._task.buffer.device)

    def _places(self) -> list[Place]:
        """Where the parameters are; asked for at each pass, as a memory may have been loaded between."""
        task = self._task
        memory, device = task.memory, task.buffer.device
        return [
            Place(
                piece.begin, piece.numel, piece.width, piece.column, stream_of(piece.key),
                0 if memory is None else memory.of(piece, device).data_ptr(),
            )
            for piece in task.layout.compressed
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
