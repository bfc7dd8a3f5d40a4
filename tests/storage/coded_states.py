"""Codes and numbers of a storage's blocks: codes one a byte, and what a call is given by its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage import StateContext, StateStorage, state_storage
from narrowgauge.storage._blockwise import pack_pairs


@dataclass(frozen=True)
class Coded:
    """A storage of `log8` or `log4`."""

    storage: StateStorage
    signed: bool

    @classmethod
    def of(cls, bits: int, signed: bool, has_normalizer: bool = False) -> Coded:
        return cls(state_storage(f"log{bits}").for_slot(signed, has_normalizer), signed)

    @property
    def bits(self) -> int:
        return int(self.storage.name[-1])

    def encode(
        self, x: Tensor, block: int, random: Tensor | None = None, v: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(codes in x's shape, numbers of the blocks)."""
        tensors = self.storage.encode(x, StateContext(x.shape, self.signed, block, v), random)
        codes = self.storage.codes(tensors, x.shape)
        (numbers,) = (tensor for name, tensor in tensors.items() if name != "codes")
        return codes, numbers

    def decode(self, codes: Tensor, numbers: Tensor, block: int, v: Tensor | None = None) -> Tensor:
        name = "scales" if numbers.dtype == torch.float32 and numbers.dim() == 1 else "ranges"
        packed = codes if self.bits == 8 else pack_pairs(codes)
        context = StateContext(codes.shape, self.signed, block, v)
        return self.storage.decode({"codes": packed, name: numbers}, context)
