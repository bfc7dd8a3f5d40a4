"""Sharded parameters: the local part of each, and the one collective in which ranks agree before a step.

Under FSDP2 and tensor parallelism each rank holds a box of a parameter, and the same box of its gradient. A step is
elementwise except for a few sums, so it treats the box as the parameter. Plans, states, blocks and kernels see
plain tensors; no operation goes through DTensor. What depends on the whole parameter is in a `Shard`: its
size, where the box begins, and where the box's random numbers begin. States are stored as the step has them; a
`state_dict` shows them as DTensors (`_sharded_state`).

Three kinds of numbers belong to a parameter as a whole: whether its gradient is finite, the sum of its gradient's
squares, and the sums that its rule asks for (LAMB, LARS, update clipping). Each rank computes them for its box;
`Collective` puts them into one float64 table, a row per parameter, and adds it up over the ranks. Every parameter
has a row, with or without a gradient, so that all ranks send the same shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge._torch_private import local

# Columns of the table: the gradient's squares, how many ranks have it not finite, the rule's sums.
SQUARES, FLAGS, TERMS, MOST_TERMS = 0, 1, 2, 6
# Elements that one block of random numbers serves, and the first element whose counter exceeds 32 bits.
_GRAIN, _FAR = 8, 1 << 34
# Elements between the random numbers of two shards that cannot use those of the whole parameter.
_APART = 1 << 40

# Parameter indices, the first column, and values (rows, columns); the sums overwrite the values.
Rows = tuple[Sequence[int], int, Tensor]


@dataclass(frozen=True)
class Shard:
    """A box of a parameter, held by some of its ranks.

    Attributes:
        shape: of the whole parameter.
        offsets, sizes: of the box.
        number, count: index of this box, and the number of boxes.
        layout: mesh and placements of the DTensor that the box is part of.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    number: int = 0
    count: int = 1
    layout: tuple[Any, Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Shard:
        """The box that is all of a parameter."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def here(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)

    @functools.cached_property
    def first(self) -> int | None:
        """Index of its first element in the flattened parameter; None if the box is not one run there."""
        inner = len(self.shape)
        while inner and self.sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        if any(size > 1 for size in self.sizes[: max(0, inner - 1)]):
            return None
        index = 0
        for offset, size in zip(self.offsets, self.shape, strict=True):
            index = index * size + offset
        return index

    @property
    def origin(self) -> int:
        """Where its random numbers begin; those of the whole parameter begin at 0.

        If the box is a run of the flattened parameter that begins at a multiple of eight, each element gets the
        random numbers that it has in the whole parameter. Any other box gets numbers of its own, far from all
        others.
        """
        first = self.first
        if first is not None and first % _GRAIN == 0 and self.numel <= _FAR:
            return first
        return (1 + self.number) * _APART

    def aligned(self, block_size: int) -> bool:
        """Whether its blocks are blocks of the whole parameter."""
        if not self.here:
            return True
        first = self.first
        if first is None or first % block_size:
            return False
        end = first + self.here
        return end % block_size == 0 or end == self.numel


def is_shared(x: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import DTensor."""
    return hasattr(x, "to_local")


def is_split(placement: Any) -> bool:
    """Whether ranks along a mesh dimension have different parts."""
    return not placement.is_replicate()


def local_gradient(p: Any, grad: Any) -> Any:
    """The local shard of a gradient, cut as its parameter is; None for None."""
    if grad is None or not is_shared(p):
        return grad
    if not is_shared(grad):
        raise RuntimeError(
            f"step: the gradient of a sharded {tuple(p.shape)} must be a DTensor, got {type(grad).__name__}"
        )
    if grad.placements != p.placements:
        # The gradient of a parameter that is replicated while its input is sharded still has to be summed.
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def as_shared(p: Any, here: Tensor) -> Any:
    """A DTensor cut as its parameter is, from its local shard."""
    return type(p.data).from_local(
        here, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def shard_of(p: Any) -> Shard | None:
    """The box of a parameter that this rank holds; None if it holds all of it."""
    if not is_shared(p) or not any(map(is_split, p.placements)):
        return None
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(f"params must be sharded or replicated, got a DTensor with {p.placements}")
    (chunk,) = p.__create_chunk_list__()
    number, count = 0, 1
    coordinate = p.device_mesh.get_coordinate() or [0] * p.device_mesh.ndim
    for at, size, placement in zip(coordinate, p.device_mesh.shape, p.placements, strict=True):
        if is_split(placement):
            number, count = number * size + at, count * size
    sizes = tuple(local(p).shape)
    offsets = tuple(chunk.offsets) if math.prod(sizes) else (0,) * len(sizes)
    return Shard(tuple(p.shape), offsets, sizes, number, count, (p.device_mesh, p.placements))


def apply_to_full(shard: Shard | None, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Gather the whole tensor of a local part x, apply a function, return the local part.

    Every rank computes the same.
    """
    if shard is None:
        return function(x)
    from torch.distributed.tensor import DTensor

    assert shard.layout is not None
    stride = tuple(math.prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape)))
    whole = DTensor.from_local(x, *shard.layout, run_check=False, shape=torch.Size(shard.shape), stride=stride)
    box = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.sizes, strict=True))
    return function(whole.full_tensor())[box]


def rows_of_ranks(shard: Shard | None) -> list[int] | None:
    """How many rows of a parameter each rank holds, if ranks hold runs of its rows on a mesh of one dimension."""
    if shard is None or shard.layout is None or shard.layout[0].ndim != 1 or not shard.layout[1][0].is_shard(0):
        return None
    world, rows = shard.count, shard.shape[0]
    most = -(-rows // world)
    sizes = [min(most, max(0, rows - rank * most)) for rank in range(world)]
    here = shard.sizes[0] if shard.here else 0
    return sizes if sizes[shard.number] == here else None


def apply_on_owners(
    shards: Sequence[Shard], xs: Sequence[Tensor], functions: Sequence[Callable[[Tensor], Tensor]]
) -> list[Tensor]:
    """Apply a function to each of some whole matrices, each on one rank; returns the local rows of the results.

    Rank i owns matrix i: the ranks send it their rows, and it sends back the rows of the result. Two exchanges
    serve as many matrices as there are ranks, and no matrix is computed twice.

    Args:
        shards: with `rows_of_ranks`, all on one mesh; at most one for each rank.
        xs: the local rows of each matrix.
        functions: of a matrix; the result has its shape and is converted to float32.
    """
    assert shards[0].layout is not None
    group = shards[0].layout[0].get_group()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    rows = [rows_of_ranks(shard) or [] for shard in shards]
    widths = [math.prod(shard.shape[1:]) for shard in shards]
    owned = rank if rank < len(shards) else None

    def exchange(parts: list[Tensor], received: list[int], like: Tensor) -> list[Tensor]:
        """Send a part to each rank; receive so many elements from each. As bytes, which every backend can send."""
        sent = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
        got, size = sent.new_empty(sum(received) * like.itemsize), like.itemsize
        dist.all_to_all_single(
            got, sent, [n * size for n in received], [part.numel() * size for part in parts], group=group
        )
        return list(torch.split(got.view(like.dtype), received))

    nothing = xs[0].new_empty(0)
    mine = [n * widths[owned] for n in rows[owned]] if owned is not None else [0] * world
    gathered = exchange([*xs, *[nothing] * (world - len(xs))], mine, nothing)
    back, nothing = [nothing.float()] * world, nothing.float()
    if owned is not None:
        whole = torch.cat(gathered).view(shards[owned].shape)
        back = list(torch.split(functions[owned](whole).to(torch.float32), rows[owned]))
    own = [of[rank] * width for of, width in zip(rows, widths, strict=True)]
    results = exchange(back, own + [0] * (world - len(xs)), nothing)
    return [result.view(x.shape) for result, x in zip(results, xs, strict=False)]


def whole_of(p: Tensor, shard: Shard | None) -> int:
    """Elements of the whole parameter that p is a shard of."""
    return shard.numel if shard is not None else p.numel()


def origin_of(shard: Shard | None) -> int:
    """Where the random numbers of a parameter's local shard begin."""
    return shard.origin if shard is not None else 0


class Collective:
    """One collective for the sums of an optimizer's parameters; `indices` are of those that ranks share.

    Along a mesh dimension that does not cut a parameter, every rank has the same box; one of them counts it. A mesh
    inside a larger one (with tensor parallelism, norms are on the data-parallel dimension alone) is treated as the
    larger one. So the usual model has one table and one collective. Unrelated meshes (experts on their own ranks)
    have one each. A mesh of some ranks that cuts along several dimensions has one collective per dimension.
    """

    def __init__(self, ps: Sequence[Tensor]) -> None:
        self._count = len(ps)
        shared: dict[int, Any] = {index: p for index, p in enumerate(ps) if shard_of(p) is not None}
        self.indices = frozenset(shared)
        meshes = list(dict.fromkeys(p.device_mesh for p in shared.values()))
        hosts = {mesh: _largest_mesh(mesh, meshes) for mesh in meshes}
        self._exchanges: list[_Exchange] = []
        for host in dict.fromkeys(mesh for mesh, _ in hosts.values()):
            cut = {
                index: {hosts[p.device_mesh][1][i] for i, one in enumerate(p.placements) if is_split(one)}
                for index, p in shared.items()
                if hosts[p.device_mesh][0] is host
            }
            self._exchanges.append(_Exchange.over(host, cut, len(ps)))
        self._on_device: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    @torch.no_grad()
    def all_reduce(self, some: Sequence[Rows], with_terms: bool) -> None:
        """Add up rows over the ranks that share their parameters; rows of other parameters stay as they are.

        `with_terms` says whether any rank sends sums of rules.
        """
        # The width is the same on all ranks, whichever of their parameters have a gradient.
        width = TERMS + (MOST_TERMS if with_terms else 0)
        for exchange in self._exchanges:
            device = exchange.device
            table = torch.zeros(self._count, width, dtype=torch.float64, device=device)
            cells = [
                (self._index(indices, device), slice(first, first + columns.shape[1]), columns)
                for indices, first, columns in some
                if len(indices)
            ]
            for index, where, columns in cells:
                table[index, where] = columns.to(device, torch.float64, non_blocking=device.type != "cpu")
            summed = torch.where(exchange.counts, table, 0.0)
            summed[:, FLAGS] = table[:, FLAGS]  # every rank's
            for group in exchange.groups:
                dist.all_reduce(summed, group=group)
            table = torch.where(exchange.members, summed, table)
            for index, where, columns in cells:
                columns.copy_(table[index, where])

    def _index(self, indices: Sequence[int], device: torch.device) -> Tensor:
        key = device, tuple(indices)
        if key not in self._on_device:
            self._on_device[key] = to_device(torch.tensor(key[1], dtype=torch.int64), device)
        return self._on_device[key]


@dataclass(eq=False)
class _Exchange:
    """The ranks that add up together.

    Attributes:
        groups: process groups to reduce over, one after the other.
        device: of the table that they send.
        members, counts: bool (parameters, 1) on that device: on this mesh; counted by this rank.
    """

    groups: list[Any]
    device: torch.device
    members: Tensor
    counts: Tensor

    @classmethod
    def over(cls, mesh: Any, cut: Mapping[int, set[int]], count: int) -> _Exchange:
        """The exchange over a mesh; `cut` has, by parameter index, the mesh dimensions along which it is cut."""
        dims = sorted(set().union(*cut.values()))
        if len(dims) > 1 and mesh.size() == dist.get_world_size():
            dims, groups = list(range(mesh.ndim)), [dist.group.WORLD]
        else:
            groups = [mesh.get_group(dim) for dim in dims]
        at = mesh.get_coordinate()
        members, counts = (torch.zeros(count, 1, dtype=torch.bool, device="cpu") for _ in range(2))
        for index, own in cut.items():
            members[index] = True
            counts[index] = all(at[dim] == 0 for dim in dims if dim not in own)
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        return cls(groups, device, to_device(members, device), to_device(counts, device))


def _largest_mesh(mesh: Any, meshes: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
    """The largest of `meshes` that contains `mesh`, and `mesh`'s dimensions in it."""
    for other in sorted(meshes, key=lambda one: -one.ndim):
        at = other.get_coordinate()
        if other is mesh or at is None or other.ndim <= mesh.ndim:
            continue
        for dims in itertools.combinations(range(other.ndim), mesh.ndim):
            part = other.mesh[tuple(slice(None) if dim in dims else at[dim] for dim in range(other.ndim))]
            if torch.equal(part, mesh.mesh):
                return other, dims
    return mesh, tuple(range(mesh.ndim))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
