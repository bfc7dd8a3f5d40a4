"""What a rank does between collectives with one bucket, by eager torch: what `_compressed_fused` must equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from narrowgauge.distributed._compressed_layout import Layout
from narrowgauge.distributed._compressed_memory import Memory
from narrowgauge.distributed._compressed_wire import Wire


@dataclass(frozen=True, eq=False)
class Task:
    """A bucket to be reduced.

    Attributes:
        wire: how numbers are encoded.
        layout: of the bucket.
        memory: what this rank remembers; None if it does not.
        buffer: the bucket's gradients, flat; the means in the end.
        rank: this one.
        step: how many reductions came before.
    """

    wire: Wire
    layout: Layout
    memory: Memory | None
    buffer: Tensor
    rank: int
    step: int


class Passes(Protocol):
    """The three parts of a reduction, each called once, in this order; see `_compressed_round`."""

    def encode(self) -> Tensor:
        """Messages, uint8 (ranks, bytes), of this rank's gradients: one for each rank."""

    def add(self, received: Tensor) -> Tensor:
        """The message, uint8 (1, bytes), of the sum of those that this rank got."""

    def finish(self, received: Tensor) -> None:
        """Put the means of all ranks' sums (ranks, bytes) into the buffer, and remember what is lost."""


class EagerPasses:
    """The passes of a bucket.

    Args:
        task: the bucket.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lost: Tensor | None = None
        self._total: Tensor

    def encode(self) -> Tensor:
        task, wire, layout = self._task, self._task.wire, self._task.layout
        rows = self._rows()
        random = wire.random(layout, task.step, task.rank, range(layout.ranks), rows.device)
        sent = wire.encode(rows, random)
        if task.memory is not None:
            # In the place of what was to be sent: what the codes lost of it.
            self._lost = rows.sub_(wire.decode(sent, layout.width))
        return sent

    def add(self, received: Tensor) -> Tensor:
        task, wire, layout = self._task, self._task.wire, self._task.layout
        self._total, *others = wire.decode(received, layout.width)
        # One after the other: the same bits wherever in a bucket a shard stands.
        for other in others:
            self._total += other
        random = wire.random(layout, task.step, None, range(task.rank, task.rank + 1), received.device)
        return wire.encode(self._total[None], random)

    def finish(self, received: Tensor) -> None:
        task, layout, buffer = self._task, self._task.layout, self._task.buffer
        # By a tensor of the device: by a number GPUs multiply with the rounded reciprocal, which is another mean.
        ranks = torch.full((), layout.ranks, dtype=torch.float32, device=buffer.device)
        mean = (task.wire.decode(received, layout.width) / ranks).to(buffer.dtype)
        for piece in layout.compressed:
            for place, gradient in piece.views(mean, buffer[piece.begin : piece.end]):
                gradient.copy_(place)
        if task.memory is not None and self._lost is not None:
            self._lost[task.rank] += self._total - mean[task.rank].to(torch.float32) * layout.ranks
            for piece in layout.compressed:
                task.memory.write(piece, self._lost, keep=~torch.isfinite(piece.columns(mean)).all())

    def _rows(self) -> Tensor:
        """The float32 matrix (ranks, width) of the gradients, each with what is remembered of it."""
        task, layout, buffer = self._task, self._task.layout, self._task.buffer
        rows = torch.zeros((layout.ranks, layout.width), dtype=torch.float32, device=buffer.device)
        for piece in layout.compressed:
            for place, gradient in piece.views(rows, buffer[piece.begin : piece.end]):
                place.copy_(gradient)
            if task.memory is not None:
                for place, remembered in piece.views(rows, task.memory.of(piece, buffer.device)):
                    place.add_(remembered)
        return rows
