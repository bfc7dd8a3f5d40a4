"""What travels: codes and scales of a shard, in one message of bytes.

A message is the float32 scales of its blocks, then the codes, a byte each or two a byte. Scales and codes are
those of `storage.quantize`, with one addition: a block that holds an infinity or NaN has NaN for its scale, and
so comes back as NaN, all of it. `quantize` bounds such numbers, which is right for a state that outlives a bad
step; in a gradient they say that the step is bad, and whoever skips it has to see them.

Random bits for stochastic rounding are Philox words with the parameter, the position in it, the step, and the
rank and hop for a counter: the same in every run, in whatever bucket the parameter travels, and another for
each of them.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.distributed._compressed_layout import Layout
from narrowgauge.formats import Coder
from narrowgauge.formats._philox import philox
from narrowgauge.formats._rounding import Rounding
from narrowgauge.storage._blockwise import decode_blocks, encode_blocks, pack_pairs, unpack_pairs

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Wire:
    """How float32 numbers become bytes and back.

    Attributes:
        values: the codebook, on the host.
        block_size: elements a scale serves, a multiple of 4.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: of the random bits.
    """

    values: Tensor
    block_size: int
    rounding: Rounding
    seed: int

    @property
    def bits(self) -> int:
        """Of a code on the wire."""
        return 4 if len(self.values) <= 16 else 8

    def nbytes(self, width: int) -> int:
        """Of a message of so many elements, a multiple of the block size."""
        return 4 * (width // self.block_size) + width * self.bits // 8

    def encode(self, rows: Tensor, random: Tensor | None) -> Tensor:
        """Messages, uint8 (rows, nbytes), of a float32 matrix (rows, width).

        Args:
            rows: the matrix.
            random: bits in its shape, or None to round to nearest.
        """
        codes, scales = encode_blocks(rows, self.coder(rows.device), self.block_size, random)
        finite = torch.isfinite(rows).view(-1, self.block_size).all(dim=1)
        scales = torch.where(finite, scales, torch.nan).view(len(rows), -1)
        packed = pack_pairs(codes) if self.bits == 4 else codes
        return torch.cat([scales.view(torch.uint8), packed.view(len(rows), -1)], dim=1)

    def decode(self, messages: Tensor, width: int) -> Tensor:
        """The float32 matrix (rows, width) that messages (rows, nbytes) stand for."""
        split = 4 * (width // self.block_size)
        scales = messages[:, :split].contiguous().view(torch.float32).view(-1)
        codes, shape = messages[:, split:], torch.Size((len(messages), width))
        codes = unpack_pairs(codes.reshape(-1), shape) if self.bits == 4 else codes.contiguous()
        return decode_blocks(codes, scales, self.coder(messages.device).values, self.block_size)

    def random(
        self, layout: Layout, step: int, sender: int | None, rows: range, device: torch.device
    ) -> Tensor | None:
        """Random bits for rows of a bucket's matrix, int64 (rows, width); None if rounding takes none.

        Args:
            layout: of the bucket.
            step: how many reductions came before.
            sender: the rank whose gradients are encoded, or None for the sum of all ranks.
            rows: which of the matrix's.
            device: where they are made.
        """
        if self.rounding == "nearest":
            return None
        # A Philox block serves four neighbours.
        places, streams = [], []
        for piece in layout.compressed:
            quarter = piece.width // 4
            first = torch.arange(rows.start, rows.stop, device=device)[:, None] * quarter
            places.append(first + torch.arange(quarter, device=device))
            streams.append(torch.full((quarter,), stream_of(piece.key), device=device))
        place = torch.cat(places, dim=1)
        when = torch.full((), step & _MASK, device=device)
        who = torch.full((), 0 if sender is None else 1 + sender, device=device)
        key = (self.seed & _MASK, self.seed >> 32 & _MASK)
        words = philox((place & _MASK, torch.cat(streams).expand_as(place), when, who), key)
        return torch.stack(words, dim=-1).view(len(rows), -1)

    def coder(self, device: torch.device) -> Coder:
        """The codebook made ready for a device."""
        return _on_device(self, device)


def stream_of(key: str) -> int:
    """Which random numbers are a parameter's."""
    return zlib.crc32(key.encode())


@functools.lru_cache(maxsize=64)
def _on_device(wire: Wire, device: torch.device) -> Coder:
    """The coder of a wire's codebook: made once, because making it looks at the values on the host."""
    made = Coder.of(wire.values)
    return Coder(made.values.to(device), made.boundaries.to(device), made.lowest)
