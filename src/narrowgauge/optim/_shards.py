"""What of a parameter lies in this process: the one place where a DTensor becomes the tensor that a step works on.

Under FSDP2 and tensor parallelism each rank holds a box of a parameter, and of its gradient the same box. A step
is elementwise but for a few sums, so it takes the box for the parameter: plans, words, blocks and kernels see plain
tensors, and no operation of a step goes through DTensor. What depends on the whole is kept in a `Shard`: how large
the parameter is, where the box begins, and where its random numbers do.

States are kept as the step has them. To the outside (`state_dict`) they are DTensors; see `_shard_words`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# What ranks add up for a parameter, by column: squares of its gradient, how much of that is not finite, and what
# its rule sums.
SQUARES, FLAGS, TERMS, MOST_TERMS = 0, 1, 2, 6
# Elements that one block of random numbers serves, and the first whose counter does not fit in 32 bits.
_GRAIN, _FAR = 8, 1 << 34
# Elements between the random numbers of two shards that have their own.
_APART = 1 << 40


@dataclass(frozen=True)
class Shard:
    """A box of a parameter, which some of its ranks hold.

    Attributes:
        shape: of the whole parameter.
        offsets, sizes: of the box.
        number, count: its place among the boxes, and how many there are.
        layout: the DTensor's mesh and placements, where it has been cut by one.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    number: int = 0
    count: int = 1
    layout: tuple[Any, Any] | None = field(default=None, compare=False, repr=False)

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
        """The place of its first element in the flat parameter; None if the box has gaps there."""
        inner = len(self.shape)
        while inner and self.sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        if any(size > 1 for size in self.sizes[: max(0, inner - 1)]):
            return None
        place = 0
        for offset, size in zip(self.offsets, self.shape, strict=True):
            place = place * size + offset
        return place

    @property
    def origin(self) -> int:
        """Where its random numbers begin, those of the whole parameter beginning at 0.

        Element for element they are those of the whole where the box is a run of the flat parameter that begins at
        a multiple of eight. Any other has numbers of its own, far from those of all others.
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
    """Whether a tensor is a DTensor, which need not be imported to ask."""
    return hasattr(x, "to_local")


def local(x: Any) -> Tensor:
    """What lies here of a tensor: itself, or the local tensor of a DTensor, with no operation and no copy.

    `to_local` makes a new Parameter of it at every call; a step asks for it three hundred times.
    """
    inner = getattr(x, "_local_tensor", x)
    if type(inner) is Tensor:
        return inner
    if hasattr(inner, "wait"):  # what a collective has not finished yet
        return inner.wait()  # type: ignore[no-any-return]
    # What says for itself how it is gathered is a tensor of torch below (`distributed.gather_codes`).
    return getattr(inner, "plain", inner)  # type: ignore[no-any-return]


def local_gradient(p: Any, grad: Any) -> Any:
    """What lies here of a gradient, cut as its parameter is; None for none.

    Raises:
        RuntimeError: for a gradient that is not a DTensor beside a parameter that is.
    """
    if grad is None or not is_shared(p):
        return grad
    if not is_shared(grad):
        raise RuntimeError(
            f"step: got a gradient of {type(grad).__name__} for a DTensor of shape {tuple(p.shape)}; takes a "
            "DTensor, as FSDP2 and tensor parallelism leave it"
        )
    if grad.placements != p.placements:
        # A parameter that is replicated where its input is sharded has a gradient that is still to be summed.
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def as_shared(p: Any, here: Tensor) -> Any:
    """A DTensor cut as its parameter is, of what lies here."""
    return type(p.data).from_local(
        here, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def part_of(shard: Shard | None, whole: Tensor) -> Tensor:
    """What lies here of a whole tensor, as a view."""
    if shard is not None:
        for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
    return whole


def is_split(placement: Any) -> bool:
    """Whether ranks along a mesh dimension have different parts."""
    return not placement.is_replicate()


def shard_of(p: Any) -> Shard | None:
    """The box of a parameter that lies here; None where all of it does.

    Raises:
        ValueError: for a DTensor that is still to be summed up.
    """
    if not is_shared(p) or not any(map(is_split, p.placements)):
        return None
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(f"params: got a DTensor with {p.placements}, takes sharded and replicated ones")
    (chunk,) = p.__create_chunk_list__()
    number, count = 0, 1
    place = p.device_mesh.get_coordinate() or [0] * p.device_mesh.ndim
    for at, size, placement in zip(place, p.device_mesh.shape, p.placements, strict=True):
        if is_split(placement):
            number, count = number * size + at, count * size
    sizes = tuple(local(p).shape)
    offsets = tuple(chunk.offsets) if math.prod(sizes) else (0,) * len(sizes)
    return Shard(tuple(p.shape), offsets, sizes, number, count, (p.device_mesh, p.placements))


def of_whole(shard: Shard | None, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of a whole tensor, of which x, and of the result what is returned, is what lies here.

    Every rank gathers the whole and does the same with it.
    """
    if shard is None:
        return function(x)
    from torch.distributed.tensor import DTensor

    assert shard.layout is not None
    stride = tuple(math.prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape)))
    whole = DTensor.from_local(x, *shard.layout, run_check=False, shape=torch.Size(shard.shape), stride=stride)
    return part_of(shard, function(whole.full_tensor()))


def any_shared(ps: Iterable[Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    return any(map(is_shared, ps))


def whole_of(p: Tensor, shard: Shard | None) -> int:
    """Elements of a whole parameter, of which p is what lies here."""
    return shard.numel if shard is not None else p.numel()


def origin_of(shard: Shard | None) -> int:
    """Where a parameter's random numbers begin here."""
    return shard.origin if shard is not None else 0
