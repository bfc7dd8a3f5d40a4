"""Codebooks: at most 256 sorted numbers in [-1, 1] that stand for all the others.

A tensor divided by the largest magnitude of its block lies in [-1, 1]; a codebook says which numbers of that
interval the codes mean. Adam's moments span many orders of magnitude inside one block, so evenly spaced codes
waste themselves on the large end: the *dynamic* map spends them decade by decade instead.

Source: 8-bit Optimizers via Block-wise Quantization, Section 1.3 and Appendix F.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DYNAMIC_DECADES = 7


@dataclass(frozen=True, eq=False)
class Coder:
    """A codebook made ready for use: its values and the boundaries between them.

    Attributes:
        values: float32 tensor (n,), ascending; code k means ``values[k]``.
        boundaries: float32 tensor (n - 1,): x has the code that counts the boundaries below x. That is the
            nearest value exactly, for every float32 x; a tie goes to the value nearer to zero.
    """

    values: Tensor
    boundaries: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Coder:
        """The coder of any codebook.

        Args:
            values: ascending float32 tensor (n,), n from 2 to 256, distinct finite values that include 0.

        Raises:
            ValueError: for anything else.
        """
        if values.dtype != torch.float32 or values.dim() != 1 or not 2 <= len(values) <= 256:
            got = f"{values.dtype} of shape {tuple(values.shape)}"
            raise ValueError(f"codebook: got {got}, takes a float32 tensor of 2 to 256 values")
        host = values.detach().cpu().numpy()
        if not (np.isfinite(host).all() and (np.diff(host) > 0).all() and (host == 0).any()):
            raise ValueError("codebook: takes ascending, distinct, finite values with a 0 among them")
        return cls(values, torch.from_numpy(_boundaries(host)).to(values.device))

    def encode(self, x: Tensor) -> Tensor:
        """Codes (uint8) of the nearest values, in x's shape; NaN gets the code of zero."""
        x = x.to(torch.float32).nan_to_num(nan=0.0)
        return torch.bucketize(x, self.boundaries).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values (float32) of the codes, in their shape."""
        return self.values[codes.to(torch.int32)]


@functools.lru_cache(maxsize=64)
def coder(name: str, signed: bool, device: torch.device) -> Coder:
    """The coder of a named codebook on a device, made once."""
    made = Coder.of(codebook(name, signed))
    return Coder(made.values.to(device), made.boundaries.to(device))


def codebook(name: str, signed: bool = True, bits: int = 8) -> Tensor:
    """A codebook by name.

    Args:
        name: ``"dynamic"``, the map that the public 8-bit optimizers train with.
        signed: with negative values (a first moment) or without (a second moment, never negative).
        bits: code width; 8.

    Returns:
        Its values: an ascending float32 tensor (2^bits,).

    Raises:
        ValueError: for a name or a width there is no codebook for.
    """
    if name not in _MAPS:
        raise ValueError(f"name: got {name!r}, takes one of {', '.join(map(repr, _MAPS))}")
    if bits != 8:
        raise ValueError(f"bits: got {bits}, takes 8 for the map {name!r}")
    return _MAPS[name](signed)


def _dynamic(signed: bool) -> Tensor:
    """The dynamic map, as the public implementation has it.

    Decade i = 0..6 holds the midpoints of C_i equal cells of [0.1, 1], scaled by 10^(i-6), with C_i = 2^i cells
    where a sign takes a bit and 2^(i+1) where none does: each decade up is resolved twice as finely. 0 and 1 are
    added. The signed map has no -1. All in float32, the order of operations included, so that codes written by
    others decode to the same numbers.
    """
    positive = []
    for decade in range(_DYNAMIC_DECADES):
        cells = 2 ** (decade if signed else decade + 1)
        # torch's float32 linspace, not numpy's: they differ in the last bit and the checksum is of torch's.
        edges = torch.linspace(0.1, 1.0, cells + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2.0
        positive.append(10.0 ** (decade - _DYNAMIC_DECADES + 1) * middles)
    half = torch.cat(positive)
    values = torch.cat([half, -half] if signed else [half])
    return torch.cat([values, torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]).sort().values


def _boundaries(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Float32 thresholds b so that `count(b < x)` is the nearest value's index, ties towards zero.

    The midpoint of two float32 values need not be a float32. For positive midpoints the largest float32 not
    above it decides; for negative ones the largest float32 below it, which sends a tie upwards, to zero.
    """
    middles = (values[:-1].astype(np.float64) + values[1:].astype(np.float64)) / 2
    rounded = middles.astype(np.float32)
    too_high = (rounded > middles) | ((middles < 0) & (rounded == middles))
    return np.where(too_high, np.nextafter(rounded, np.float32(-np.inf)), rounded).astype(np.float32)


_MAPS = {"dynamic": _dynamic}
