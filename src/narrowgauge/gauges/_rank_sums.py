"""What ranks have measured, put together by one collective, and its way to the host.

A step's measurements are one vector on the device. Ranks gather their vectors, add what are sums and keep the
largest of what are maxima, each of them with the same result. Then the vector goes to pinned memory while the
device works on, and is read when it has arrived. No step waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.gauges._records import Record


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together.

    Attributes:
        group: None for this process alone.
    """

    group: Any = None

    @classmethod
    def all(cls) -> Ranks:
        """Those of the default process group, if there is one."""
        ready = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return cls(dist.group.WORLD) if ready else cls()

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.group is None or dist.get_rank(self.group) == 0

    def join(self, vector: Tensor, largest: Tensor) -> Tensor:
        """One vector of all ranks' vectors: their sums, but the maxima where `largest` is true."""
        if self.group is None:
            return vector
        rows = vector.new_empty((self.count, vector.numel()))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
        gather(rows.view(-1), vector, group=self.group)
        return torch.where(largest, rows.amax(0), rows.sum(0))

    def owns(self, x: Tensor) -> bool:
        """Whether this rank counts a tensor, or the shard of it that it has: every element counts once."""
        if self.group is None:
            return True
        mesh, coordinates = getattr(x, "device_mesh", None), None
        if mesh is not None:
            coordinates = mesh.get_coordinate()
        if mesh is None or coordinates is None:
            return self.first
        placements: Any = x.placements  # type: ignore[attr-defined]
        return all(at == 0 or not place.is_replicate() for at, place in zip(coordinates, placements, strict=True))


Take = Callable[[Tensor], None]
Part = tuple[Tensor, tuple[int, ...], Callable[[Tensor], list[Record]]]  # table, columns of maxima, its records


@dataclass(eq=False)
class Message:
    """Tables on their way to the host, and who takes them there."""

    device: torch.device
    _parts: list[Tensor] = field(default_factory=list)
    _largest: list[Tensor] = field(default_factory=list)
    _takers: list[tuple[torch.Size, Take]] = field(default_factory=list)

    def add(self, table: Tensor, take: Take, largest: tuple[int, ...] = ()) -> None:
        """Add a float64 table.

        Args:
            table: (rows, columns).
            take: is called with it on the host, joined over ranks.
            largest: columns of which ranks keep the largest; the rest is added.
        """
        mask = torch.zeros(table.shape[-1], dtype=torch.bool)
        mask[list(largest)] = True
        self._parts.append(table.reshape(-1).to(self.device, torch.float64, non_blocking=True))
        self._largest.append(mask.expand(table.shape).reshape(-1))
        self._takers.append((table.shape, take))

    def send(self, ranks: Ranks) -> Arriving:
        """Join it over ranks, a collective, and start its copy to the host."""
        vector = torch.cat(self._parts)
        if ranks.group is not None:
            vector = ranks.join(vector, torch.cat(self._largest).to(self.device, non_blocking=True))
        return Arriving(vector, self._takers)


class Arriving:
    """A vector that is being copied to the host."""

    def __init__(self, vector: Tensor, takers: list[tuple[torch.Size, Take]]) -> None:
        self._takers = takers
        self._event: Any = None
        if vector.device.type != "cuda":
            self._here = vector.to("cpu")
            return
        self._here = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        with torch.cuda.device(vector.device):
            self._here.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def here(self) -> bool:
        return self._event is None or self._event.query()

    def take(self) -> None:
        """Hand the tables over; waits for those that are not here."""
        if self._event is not None:
            self._event.synchronize()
        parts = torch.split(self._here, [shape.numel() for shape, _ in self._takers])
        for (shape, take), part in zip(self._takers, parts, strict=True):
            take(part.view(shape))
