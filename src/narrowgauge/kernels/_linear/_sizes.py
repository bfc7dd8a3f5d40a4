"""Sizes of tiles and grids, on the host. Triton's own `cdiv` and `next_power_of_2` take microseconds there."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


def over(count: int, size: int) -> int:
    """How many pieces of a size take a count."""
    return -(-count // size)


def power_above(count: int) -> int:
    """The smallest power of two that is not below a count, which is at least 1."""
    return 1 << (count - 1).bit_length()


@overload
def words(tensor: Tensor) -> Tensor: ...
@overload
def words(tensor: None) -> None: ...
def words(tensor: Tensor | None) -> Tensor | None:
    """A tensor as kernels write it: by its bits, where it is float8 or has 16."""
    if tensor is None or tensor.dtype in (torch.int8, torch.float32):
        return tensor
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
