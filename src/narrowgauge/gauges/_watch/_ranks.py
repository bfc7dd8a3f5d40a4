"""The sums of all ranks, added by one collective, and their copy to the host.

The measurements of a step are one vector on the device. Ranks gather their vectors; each adds what are sums and
takes the largest of what are maxima. The result is copied to pinned memory while the device computes, and read when
it has
arrived: no step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.group is None or dist.get_rank(self.group) == 0

    def join(self, vector: Tensor, largest: Tensor) -> Tensor:
        """The sums of all ranks' vectors, and the maxima where `largest` is true."""
        rows = vector.new_empty((dist.get_world_size(self.group), vector.numel()))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
        gather(rows.view(-1), vector, group=self.group)
        return torch.where(largest, rows.amax(0), rows.sum(0))

    def owns(self, x: Tensor) -> bool:
        """Whether this rank counts a tensor, or its shard of it: every element counts once."""
        if self.group is None:
            return True
        mesh = getattr(x, "device_mesh", None)
        coordinates = mesh.get_coordinate() if mesh is not None else None
        if coordinates is None:
            return self.first
        placements: Any = x.placements  # type: ignore[attr-defined]
        return all(at == 0 or not place.is_replicate() for at, place in zip(coordinates, placements, strict=True))


@dataclass(frozen=True, eq=False)
class Part:
    """A table of measurements, and what makes records of it.

    Attributes:
        table: float64 (rows, columns), or a vector.
        records: makes records of the table on the host, joined over ranks.
        largest: columns of maxima; the others are sums.
    """

    table: Tensor
    records: Callable[[Tensor], list[Record]]
    largest: tuple[int, ...] = ()


class Message:
    """Tables on their way to the host: one collective, one copy.

    Args:
        device: where they are put together.
        parts: at least one.
        ranks: whose tables are joined.
    """

    def __init__(self, device: torch.device, parts: Sequence[Part], ranks: Ranks) -> None:
        self._parts = parts
        tables = [part.table.reshape(-1).to(device, torch.float64, non_blocking=True) for part in parts]
        vector = torch.cat(tables)
        if ranks.group is not None:
            masks = []
            for part in parts:
                mask = torch.zeros(part.table.shape[-1], dtype=torch.bool)
                mask[list(part.largest)] = True
                masks.append(mask.expand(part.table.shape).reshape(-1))
            vector = ranks.join(vector, torch.cat(masks).to(device, non_blocking=True))
        self._event: Any = None
        if vector.device.type != "cuda":
            self._on_host = vector.to("cpu")
            return
        self._on_host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        with torch.cuda.device(vector.device):
            self._on_host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> Iterator[tuple[Part, Tensor]]:
        """The parts and their tables on the host; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        tables = torch.split(self._on_host, [part.table.numel() for part in self._parts])
        for part, table in zip(self._parts, tables, strict=True):
            yield part, table.view(part.table.shape)
