"""What the kernels of compressed gradients are compiled for, and the table of parameters that they read.

A message is what `narrowgauge.distributed` sends of a bucket of gradients: scales of its blocks, then codes. Three
passes make messages and read them: gradients to codes, all ranks' codes to those of their sum, codes of the sums to
gradients. `_c_allreduce` has them for the CPU and `_allreduce` for GPUs, with the same methods: constants of a
bucket are passed once, and what changes between steps is passed to each call.
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

# The most elements of a block: it is kept on the stack, or in a program's registers, where twice as many spill.
LARGEST_BLOCK = 4096
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class AllreduceKey:
    """Everything that the code of the passes depends on."""

    coder: Coder  # of the codebook, on the host
    block: int  # elements that share a scale, a multiple of 4
    bits: int  # of a code in a message, 8 or 4
    stochastic: bool
    dtype: torch.dtype  # of the gradients
    residual: torch.dtype | None  # dtype of error feedback, if there is any

    @cached_property
    def table(self) -> CodebookTable | None:
        """The table that encodes by one look-up; None if values are not mirrored, or a cell would hold two
        boundaries."""
        try:
            return CodebookTable.of(self.coder)
        except ValueError:
            return None

    @cached_property
    def boundaries(self) -> npt.NDArray[np.float32]:
        """Float32 (256,): the codebook's boundaries, padded with infinities."""
        found = self.coder.boundaries.numpy()
        return np.pad(found, (0, 256 - len(found)), constant_values=np.float32(np.inf))

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """Float32 (256,): the value of each code."""
        return np.pad(self.coder.values.numpy(), (0, 256 - len(self.coder.values)))

    def unsupported(self) -> str | None:
        """Why there are no kernels for it, None if there are."""
        return None if self.block <= LARGEST_BLOCK else f"block_size {self.block} is above {LARGEST_BLOCK}"


class Place(NamedTuple):
    """A parameter in a bucket, as kernels read it."""

    begin: int  # of its gradient, in elements of the bucket's buffer
    numel: int
    width: int  # elements of a shard, a multiple of the block
    column: int  # where the shards begin in a row of the messages' matrix
    stream: int  # of its random numbers
    residual: int  # the address of its residual, 0 without error feedback


class BucketNumbers(NamedTuple):
    """The same for all parameters of a bucket and at every step."""

    ranks: int
    rank: int
    width: int  # elements of a message
    seed: int  # of random numbers


def table_of(places: Sequence[Place]) -> npt.NDArray[np.int64]:
    """Int64 (parameters, 6)."""
    return np.array(places, dtype=np.int64).reshape(-1, len(Place._fields))
