"""Codebooks as kernels take them: values, and cells of the leading bits that encode to them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from narrowgauge.formats import Coder, coder
from narrowgauge.storage._states._blocks import _sixteenths

FIRST_CELL = 97 << 7  # of a codebook's table: bits of 2^-30, below which all is zero in every codebook of ours


def _coder(name: str, signed: bool, bits: int, device: torch.device) -> Coder:
    return _sixteenths(device) if bits == 4 and not signed else coder(name, signed, device, bits)


def mirror(name: str, signed: bool, bits: int) -> int:
    """Twice the code of zero: a negative number has that less the code of the positive one."""
    if not signed:
        return 0
    values = _coder(name, signed, bits, torch.device("cpu")).values
    return 2 * int((values < 0).sum())


@functools.lru_cache(maxsize=64)
def codebook_cells(name: str, signed: bool, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(values, cells) of a codebook; a cell holds what encodes to it, see `table_encode`."""
    made = _coder(name, signed, bits, device)
    boundaries = made.boundaries.cpu().view(torch.int32)
    positive = boundaries[made.boundaries.cpu() >= 0]
    below = len(boundaries) - len(positive)
    keys = torch.arange(FIRST_CELL, (0x3F80) + 1, dtype=torch.int32)
    start = torch.bucketize(keys << 16, positive)
    # A boundary b has the code that counts boundaries below x: x > b goes up, x = b does not.
    inside = torch.bucketize((keys << 16) | 0xFFFF, positive, right=True) - start
    if int(inside.max()) > 1 or int(positive.min()) < (FIRST_CELL << 16):
        raise NotImplementedError(f"codebook {name!r}: two boundaries in one cell")
    cut = torch.where(inside > 0, positive[start.clamp_max(len(positive) - 1)] & 0xFFFF, 0xFFFF)
    # A sum with the lower 16 bits of x carries into the code just where they are above the boundary's.
    cells = ((start + below) << 16 | (0xFFFF - cut)).to(torch.int32)
    # A step that is not going to be taken may ask for what lies beyond one.
    beyond = cells[-1:].expand((1 << 15) - FIRST_CELL - len(cells))
    return made.values, torch.cat([cells, beyond]).to(device)
