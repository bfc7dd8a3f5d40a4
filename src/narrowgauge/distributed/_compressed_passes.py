"""One bucket's reduction: what a rank computes between collectives, and the bytes that it sends.

    encode    every rank encodes its gradients plus its residual, and sends each rank that rank's shard
    add       every rank decodes the shards that it received, adds them in float32, and sends the encoded sum to all
    finish    every rank decodes the same sums, so that all have the same bits, and stores its new residual

With e_r the residual of rank r and Q quantization, the result is

    mean = cast(Q(sum over r of Q(g_r + e_r)) / ranks),

and the new residual is g_r + e_r - Q(g_r + e_r): what the rank's own codes lost. What the sum lost, sum minus ranks
times mean, is known to the rank that computed the sum, which adds it to **its own residual**, for its shard: only
the sum of residuals counts, so it does not matter which rank stores an error. One number an element thus serves
both hops and the cast to the gradients' dtype, and nothing that was taken from a gradient is lost:

    ranks * sum over steps of mean  +  sum over ranks of e  =  sum over steps and ranks of g.

Residuals are written at the end, and only for parameters whose mean is finite: an optimizer that skips such a
gradient skips all of it. A backward pass that dies leaves residuals as they were.

A message is the float32 scales of a shard's blocks, then the codes, one byte each or two in a byte. Both are those
of `storage.quantize`, with one difference: a block with an infinity or NaN has a NaN scale, so all of it decodes to
NaN. `quantize` clamps such numbers, which is right for an optimizer state that outlives a bad step; in a gradient
they say that the step is bad, and an optimizer that skips bad steps must see them.

`EagerPasses` is the specification. `FusedPasses` runs each pass as one kernel over all parameters of the bucket
(Triton on a GPU, C on a CPU) with the same bits; eager torch makes some thirty passes over memory instead.

Sources: 1-bit SGD (Seide et al., 2014) and EF-SGD (Karimireddy et al., 2019) for error feedback; the two hops are
those of 1-bit Adam (Tang et al., 2021).
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.distributed._compressed_layout import ErrorFeedback, Layout
from narrowgauge.formats import Coder
from narrowgauge.formats._philox import philox
from narrowgauge.formats._rounding import Rounding
from narrowgauge.kernels._allreduce_key import GRADIENTS, AllreduceKey, BucketNumbers, Place
from narrowgauge.kernels._c_allreduce import CAllreduce, CBucket
from narrowgauge.kernels._c_library import Unavailable
from narrowgauge.kernels._triton import unavailable
from narrowgauge.storage._blockwise import decode_blocks, encode_blocks, pack_pairs, unpack_pairs

if TYPE_CHECKING:  # it imports triton
    from narrowgauge.kernels._allreduce import TritonAllreduce, TritonBucket

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class BlockCodec:
    """How float32 numbers become bytes and back.

    Attributes:
        values: the codebook, on the host.
        block_size: elements that share a scale, a multiple of 4.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: of the random bits.
    """

    values: Tensor
    block_size: int
    rounding: Rounding
    seed: int

    @property
    def bits(self) -> int:
        """Bits of a code in a message."""
        return 4 if len(self.values) <= 16 else 8

    def nbytes(self, width: int) -> int:
        """Bytes of a message of `width` elements, a multiple of the block size."""
        return 4 * (width // self.block_size) + width * self.bits // 8

    def encode(self, rows: Tensor, random: Tensor | None) -> Tensor:
        """Messages, uint8 (rows, nbytes), of a float32 matrix (rows, width).

        `random`: bits in its shape, or None to round to nearest.
        """
        codes, scales = encode_blocks(rows, self.coder(rows.device), self.block_size, random)
        finite = torch.isfinite(rows).view(-1, self.block_size).all(dim=1)
        scales = torch.where(finite, scales, torch.nan).view(len(rows), -1)
        packed = pack_pairs(codes) if self.bits == 4 else codes
        return torch.cat([scales.view(torch.uint8), packed.view(len(rows), -1)], dim=1)

    def decode(self, messages: Tensor, width: int) -> Tensor:
        """The float32 matrix (rows, width) of messages (rows, nbytes)."""
        split = 4 * (width // self.block_size)
        scales = messages[:, :split].contiguous().view(torch.float32).view(-1)
        codes, shape = messages[:, split:], torch.Size((len(messages), width))
        codes = unpack_pairs(codes.reshape(-1), shape) if self.bits == 4 else codes.contiguous()
        return decode_blocks(codes, scales, self.coder(messages.device).values, self.block_size)

    def random(
        self, layout: Layout, step: int, sender: int | None, rows: range, device: torch.device
    ) -> Tensor | None:
        """Random bits for rows of a bucket's matrix, int64 (rows, width); None for rounding to nearest.

        They are Philox words whose counter is the position in the parameter, the parameter, the step, and the
        sender: the same in every run and in every bucket.

        Args:
            layout: of the bucket.
            step: how many reductions came before.
            sender: the rank whose gradients are encoded, or None for the sum of all ranks.
            rows: which rows of the matrix.
            device: where the bits are needed.
        """
        if self.rounding == "nearest":
            return None
        positions, streams = [], []
        for entry in layout.compressed:
            quarter = entry.width // 4  # a Philox block serves four neighbors
            first = torch.arange(rows.start, rows.stop, device=device)[:, None] * quarter
            positions.append(first + torch.arange(quarter, device=device))
            streams.append(torch.full((quarter,), stream_of(entry.key), device=device))
        position = torch.cat(positions, dim=1)
        when = torch.full((), step & _MASK, device=device)
        who = torch.full((), 0 if sender is None else 1 + sender, device=device)
        key = (self.seed & _MASK, self.seed >> 32 & _MASK)
        words = philox((position & _MASK, torch.cat(streams).expand_as(position), when, who), key)
        return torch.stack(words, dim=-1).view(len(rows), -1)

    def coder(self, device: torch.device) -> Coder:
        """The codebook, prepared for a device."""
        return _on_device(self, device)


def stream_of(key: str) -> int:
    """The random stream of a parameter."""
    return zlib.crc32(key.encode())


@functools.lru_cache(maxsize=64)
def _on_device(codec: BlockCodec, device: torch.device) -> Coder:
    made = Coder.of(codec.values)
    return Coder(made.values.to(device), made.boundaries.to(device), made.lowest)


@dataclass(frozen=True, eq=False)
class Reduction:
    """A bucket to reduce.

    Attributes:
        codec: how numbers are encoded.
        layout: of the bucket.
        feedback: this rank's residuals; None without error feedback.
        buffer: the bucket's gradients, flat; the means at the end.
        rank: this rank.
        step: how many reductions came before.
    """

    codec: BlockCodec
    layout: Layout
    feedback: ErrorFeedback | None
    buffer: Tensor
    rank: int
    step: int


class AllreducePasses(Protocol):
    """The three passes of a reduction, each called once, in this order."""

    def encode(self) -> Tensor:
        """Messages, uint8 (ranks, bytes), of this rank's gradients: one for each rank."""

    def add(self, received: Tensor) -> Tensor:
        """The message, uint8 (1, bytes), of the sum of the messages that this rank received."""

    def finish(self, received: Tensor) -> None:
        """Write the means of all ranks' sums (ranks, bytes) into the buffer, and the new residual."""


class EagerPasses:
    """The passes in eager torch."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._lost: Tensor | None = None
        self._total: Tensor

    def encode(self) -> Tensor:
        r, codec, layout = self._reduction, self._reduction.codec, self._reduction.layout
        rows = self._rows()
        random = codec.random(layout, r.step, r.rank, range(layout.ranks), rows.device)
        sent = codec.encode(rows, random)
        if r.feedback is not None:
            self._lost = rows.sub_(codec.decode(sent, layout.width))
        return sent

    def add(self, received: Tensor) -> Tensor:
        r, codec, layout = self._reduction, self._reduction.codec, self._reduction.layout
        self._total, *others = codec.decode(received, layout.width)
        # In the order of ranks: the same bits wherever a shard stands in a bucket.
        for other in others:
            self._total += other
        random = codec.random(layout, r.step, None, range(r.rank, r.rank + 1), received.device)
        return codec.encode(self._total[None], random)

    def finish(self, received: Tensor) -> None:
        r, layout, buffer = self._reduction, self._reduction.layout, self._reduction.buffer
        # A tensor on the device: by a Python number GPUs multiply with the rounded reciprocal, which differs.
        ranks = torch.full((), layout.ranks, dtype=torch.float32, device=buffer.device)
        mean = (r.codec.decode(received, layout.width) / ranks).to(buffer.dtype)
        for entry in layout.compressed:
            for part, gradient in entry.views(mean, buffer[entry.begin : entry.end]):
                gradient.copy_(part)
        if r.feedback is not None and self._lost is not None:
            self._lost[r.rank] += self._total - mean[r.rank].to(torch.float32) * layout.ranks
            for entry in layout.compressed:
                r.feedback.write(entry, self._lost, keep=~torch.isfinite(entry.columns(mean)).all())

    def _rows(self) -> Tensor:
        """The float32 matrix (ranks, width) of the gradients plus their residuals."""
        r, layout, buffer = self._reduction, self._reduction.layout, self._reduction.buffer
        rows = torch.zeros((layout.ranks, layout.width), dtype=torch.float32, device=buffer.device)
        for entry in layout.compressed:
            for part, gradient in entry.views(rows, buffer[entry.begin : entry.end]):
                part.copy_(gradient)
            if r.feedback is not None:
                for part, residual in entry.views(rows, r.feedback.of(entry, buffer.device)):
                    part.add_(residual)
        return rows


class FusedPasses:
    """The passes as kernels.

    The residual is not written while gradients are encoded. At the end the gradients are still in the buffer, the
    residual is unchanged and this rank's codes were kept, so the last kernel computes what the codes lost without a
    second float32 copy.
    """

    def __init__(self, reduction: Reduction, kernels: CAllreduce | TritonAllreduce) -> None:
        self._reduction, self._kernels = reduction, kernels
        self._bytes = reduction.codec.nbytes(reduction.layout.width)
        self._device = reduction.buffer.device
        self._sent: Tensor
        self._total: Tensor | None = None

    def encode(self) -> Tensor:
        r = self._reduction
        self._sent = self._messages(r.layout.ranks)
        self._bucket().encode(r.buffer, self._sent, r.step)
        return self._sent

    def add(self, received: Tensor) -> Tensor:
        r, sent = self._reduction, self._messages(1)
        if r.feedback is not None:
            self._total = torch.empty(r.layout.width, dtype=torch.float32, device=self._device)
        self._bucket().add(received, sent, self._total, r.step)
        return sent

    def finish(self, received: Tensor) -> None:
        buffer = self._reduction.buffer
        self._bucket().finish(buffer, self._sent, received, self._total)
        increment_version(buffer)

    def _messages(self, count: int) -> Tensor:
        return torch.empty((count, self._bytes), dtype=torch.uint8, device=self._device)

    def _bucket(self) -> CBucket | TritonBucket:
        """The bucket's kernels; looked up at each pass, because a state may be loaded between two."""
        r, kernels = self._reduction, self._kernels
        feedback, scratch = r.feedback, r.layout.scratch
        moves = 0 if feedback is None else feedback.moves
        found: tuple[int, CBucket | TritonBucket] | None = scratch.get((kernels, feedback, r.rank))
        if found is None or found[0] != moves:
            numbers = BucketNumbers(r.layout.ranks, r.rank, r.layout.width, r.codec.seed)
            bucket = kernels.bucket(self._places(), numbers, self._device)
            found = (0 if feedback is None else feedback.moves), bucket  # `_places` may have moved residuals
            scratch[kernels, feedback, r.rank] = found
        return found[1]

    def _places(self) -> list[Place]:
        feedback, device = self._reduction.feedback, self._device
        return [
            Place(
                entry.begin, entry.numel, entry.width, entry.column, stream_of(entry.key),
                0 if feedback is None else feedback.of(entry, device).data_ptr(),
            )
            for entry in self._reduction.layout.compressed
        ]  # fmt: skip


def passes_of(reduction: Reduction) -> AllreducePasses:
    """The fastest passes for a bucket."""
    r, buffer = reduction, reduction.buffer
    plain = type(buffer) is Tensor and buffer.is_contiguous() and not buffer.is_neg()
    if not plain or not r.layout.compressed:
        return EagerPasses(r)
    kernels = kernels_of(r.codec, r.feedback, buffer.dtype, buffer.device)
    return EagerPasses(r) if isinstance(kernels, str) else FusedPasses(r, kernels)


def path_of(
    codec: BlockCodec, feedback: ErrorFeedback | None, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """(what reduces gradients of a dtype on a device, why nothing faster does)."""
    kernels = kernels_of(codec, feedback, dtype, device)
    if isinstance(kernels, str):
        return "eager torch", f"not fused: {kernels}"
    return ("fused C" if isinstance(kernels, CAllreduce) else "fused Triton"), ""


def kernels_of(
    codec: BlockCodec, feedback: ErrorFeedback | None, dtype: torch.dtype, device: torch.device
) -> CAllreduce | TritonAllreduce | str:
    """The kernels for gradients of a dtype on a device, or why there are none."""
    return _kernels(codec, None if feedback is None else feedback.dtype, dtype, device)


@functools.lru_cache(maxsize=64)
def _kernels(
    codec: BlockCodec, residual: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> CAllreduce | TritonAllreduce | str:
    if dtype not in GRADIENTS:
        return f"gradients of {dtype}"
    stochastic = codec.rounding == "stochastic"
    key = AllreduceKey(codec.coder(torch.device("cpu")), codec.block_size, codec.bits, stochastic, dtype, residual)
    try:
        if device.type == "cpu":
            return CAllreduce(key)
        why = unavailable(device)
        if why is not None:
            return why
        from narrowgauge.kernels._allreduce import TritonAllreduce  # which imports triton

        return TritonAllreduce(key)
    except Unavailable as error:
        return str(error)
