"""What kernels of messages are made for, and the table of places that they read.

A message is what `narrowgauge.distributed` sends of a bucket of gradients: scales of its blocks, then codes. Three
passes make it and take it apart: gradients to codes, all ranks' codes to those of their sum, those of the sums to
gradients. `_c_messages` has them for the CPU and `_messages` for GPUs, with the same methods: what is the same at
every step is told once a bucket, and its three passes are then called with what is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from narrowgauge.formats import Coder
from narrowgauge.kernels._codec import CodebookTable

# The most elements of a block: it is kept in a stack, or in the registers of a program, where twice as many spill.
LARGEST_BLOCK = 4096
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Kind:
    """All that code of the passes depends on.

    Attributes:
        coder: of the codebook, on the host.
        block: elements a scale serves, a multiple of 4.
        bits: of a code on the wire, 8 or 4.
        stochastic: whether codes are rounded by chance.
        dtype: the gradients'.
        memory: that of what is remembered, None if nothing is.
    """

    coder: Coder
    block: int
    bits: int
    stochastic: bool
    dtype: torch.dtype
    memory: torch.dtype | None

    @cached_property
    def table(self) -> CodebookTable | None:
        """What encodes by one look-up; None if values are not mirrored, or a cell would hold two boundaries."""
        try:
            return CodebookTable.of(self.coder)
        except ValueError:
            return None

    @cached_property
    def boundaries(self) -> npt.NDArray[np.float32]:
        """Float32 (256,): the codebook's, infinities behind."""
        found = self.coder.boundaries.numpy()
        return np.pad(found, (0, 256 - len(found)), constant_values=np.float32(np.inf))

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """Float32 (256,): what codes mean."""
        return np.pad(self.coder.values.numpy(), (0, 256 - len(self.coder.values)))

    def refused(self) -> str | None:
        """Why there are no kernels of this kind, None if there are."""
        if self.block > LARGEST_BLOCK:
            return f"block_size {self.block}; takes up to {LARGEST_BLOCK}"
        return None


class Place(NamedTuple):
    """A parameter in a bucket, as kernels are told of it.

    Attributes:
        begin: of its gradient, in elements of the bucket's buffer.
        numel: its elements.
        width: elements of a shard, a multiple of the block.
        column: where the shards begin in a row of the messages' matrix.
        stream: of its random numbers.
        memory: the address of what is remembered of it, 0 if nothing is.
    """

    begin: int
    numel: int
    width: int
    column: int
    stream: int
    memory: int


class Numbers(NamedTuple):
    """What is the same for all parameters of a bucket and at every step: ranks and which one this is, elements of a
    message, and the seed of random numbers."""

    ranks: int
    rank: int
    width: int
    seed: int


def table_of(places: Sequence[Place]) -> npt.NDArray[np.int64]:
    """Int64 (parameters, 6)."""
    return np.array(places, dtype=np.int64).reshape(-1, len(Place._fields))
