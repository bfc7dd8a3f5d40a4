"""What ranks that share parameters must agree on before a step, in one collective.

Three kinds of numbers belong to a parameter as a whole: whether its gradient is finite, the sum of its gradient's
squares, and the sums that its rule asks for (LAMB, LARS, update clipping). Each rank works them out for its box;
here they are put into one float64 table, a row a parameter, and added up over the ranks. All parameters have a row,
with or without a gradient, so that ranks never disagree on what they send.

Along a mesh dimension that a parameter is not cut along, every rank has the same box, and one of them counts. A
mesh that is part of a larger one (norms under tensor parallelism lie on the data-parallel dimension alone) is
treated as that one: so the usual model has one table and one collective. Meshes that have nothing to do with each
other (experts on ranks of their own) take one each, as do meshes cut along several dimensions that are not all
ranks, a collective a dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.optim._fused_numbers import sent
from narrowgauge.optim._shards import FLAGS, MOST_TERMS, TERMS, is_split, shard_of

# Places of rows, the first column, and columns of them; written over.
Rows = tuple[Sequence[int], int, Tensor]


class ShardSums:
    """The sums of one optimizer's parameters.

    Args:
        ps: all its parameters, in order.

    Attributes:
        agreed: flags that ranks have agreed on before this step, as `add_up` left them; None where they have not.
    """

    def __init__(self, ps: Sequence[Tensor]) -> None:
        self.agreed: Sequence[Rows] | None = None
        self._count = len(ps)
        shared: dict[int, Any] = {place: p for place, p in enumerate(ps) if shard_of(p) is not None}
        self.places = frozenset(shared)
        meshes = list(dict.fromkeys(p.device_mesh for p in shared.values()))
        hosts = {mesh: _host(mesh, meshes) for mesh in meshes}
        self._reaches: list[_Reach] = []
        for host in dict.fromkeys(mesh for mesh, _ in hosts.values()):
            cut = {
                place: {hosts[p.device_mesh][1][i] for i, one in enumerate(p.placements) if is_split(one)}
                for place, p in shared.items()
                if hosts[p.device_mesh][0] is host
            }
            self._reaches.append(_Reach.of(host, cut, len(ps)))
        self._indices: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    @torch.no_grad()
    def add_up(self, some: Sequence[Rows], with_terms: bool) -> None:
        """Add up rows over the ranks that share their parameters; rows of others stay as they are.

        Args:
            some: the rows.
            with_terms: whether a rule's sums are among them, on any rank.

        Raises:
            ValueError: for a rule with too many sums.
        """
        # The same on all ranks, whichever parameters have a gradient there.
        width = TERMS + (MOST_TERMS if with_terms else 0)
        most = max((first + table.shape[1] for _, first, table in some), default=0)
        if most > width:
            raise ValueError(f"rule: got {most - TERMS} terms, takes {MOST_TERMS} where ranks share parameters")
        for reach in self._reaches:
            device = reach.device
            whole = torch.zeros(self._count, width, dtype=torch.float64, device=device)
            cells = [
                (self._index(places, device), slice(first, first + table.shape[1]), table)
                for places, first, table in some
                if len(places)
            ]
            for index, columns, table in cells:
                whole[index, columns] = table.to(device, torch.float64, non_blocking=device.type != "cpu")
            given = torch.where(reach.on("counts", device), whole, 0.0)
            for group in reach.groups:
                dist.all_reduce(given, group=group)
            whole = torch.where(reach.on("members", device), given, whole)
            for index, columns, table in cells:
                table.copy_(whole[index, columns])

    def recall(self, some: Sequence[Rows]) -> None:
        """Write into rows of flags what has been agreed on."""
        assert self.agreed is not None
        for places, first, table in some:
            if not len(places):
                continue
            flags = torch.zeros(self._count, dtype=torch.float64, device=table.device)
            for known, begin, agreed in self.agreed:
                flags[self._index(known, table.device)] = agreed[:, FLAGS - begin].to(table.device)
            table[:, FLAGS - first] = flags[self._index(places, table.device)].to(table.dtype)

    def _index(self, places: Sequence[int], device: torch.device) -> Tensor:
        key = device, tuple(places)
        if key not in self._indices:
            self._indices[key] = sent(torch.tensor(key[1], dtype=torch.int64), device)
        return self._indices[key]


@dataclass(eq=False)
class _Reach:
    """Ranks that add up together.

    Attributes:
        groups: over which, one after the other.
        device: of what they send.
        members: bool (parameters, 1): which parameters are theirs.
        counts: bool, the same: which of them this rank counts for.
        there: both, on other devices.
    """

    groups: list[Any]
    device: torch.device
    members: Tensor
    counts: Tensor
    there: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Any, cut: dict[int, set[int]], count: int) -> _Reach:
        """Of the parameters on a mesh.

        Args:
            mesh: the mesh.
            cut: by place, the mesh dimensions along which a parameter is cut.
            count: of all parameters.
        """
        dims = sorted(set().union(*cut.values()))
        if len(dims) > 1 and mesh.size() == dist.get_world_size():
            dims, groups = list(range(mesh.ndim)), [dist.group.WORLD]
        else:
            groups = [mesh.get_group(dim) for dim in dims]
        at = mesh.get_coordinate()
        members, counts = (torch.zeros(count, 1, dtype=torch.bool, device="cpu") for _ in range(2))
        for place, mine in cut.items():
            members[place] = True
            counts[place] = all(at[dim] == 0 for dim in dims if dim not in mine)
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        return cls(groups, device, members, counts)

    def on(self, what: str, device: torch.device) -> Tensor:
        if (what, device) not in self.there:
            self.there[what, device] = sent(getattr(self, what), device)
        return self.there[what, device]


def _host(mesh: Any, meshes: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
    """The largest of some meshes that a mesh is a part of, and its dimensions there."""
    for other in sorted(meshes, key=lambda one: -one.ndim):
        at = other.get_coordinate()
        if other is mesh or at is None or other.ndim <= mesh.ndim:
            continue
        for dims in itertools.combinations(range(other.ndim), mesh.ndim):
            part = other.mesh[tuple(slice(None) if dim in dims else at[dim] for dim in range(other.ndim))]
            if torch.equal(part, mesh.mesh):
                return other, dims
    return mesh, tuple(range(mesh.ndim))
