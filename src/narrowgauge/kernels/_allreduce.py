# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""The passes of compressed gradients on a GPU: each one launch over all parameters of a bucket.

The specification is `narrowgauge.distributed._compressed_passes`, bit for bit. A program takes a tile (blocks,
elements of a block) of one parameter: a list of owners says which, and a table of places where it lies (see
`_allreduce_key`). Blocks are of any multiple of 4 elements and tiles of powers of two; elements beyond a block
count as zero. Messages are read and written in words of four codes, aligned to their size; with 4-bit codes scales
need not be aligned, so they are read and written in halves.

The last pass first asks whether each parameter's mean is finite: one more launch, over scales alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels._allreduce_key import AllreduceKey, BucketNumbers, Place, table_of
from narrowgauge.kernels._c_library import Unavailable
from narrowgauge.kernels._codec import KINDS
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._step._codebooks import fast_normalize, normalize
from narrowgauge.kernels._step._floats import (
    INFINITY,
    _philox,
    any_of,
    bits_of,
    column_max,
    float_of,
    gather,
    narrow,
    widen,
)
from narrowgauge.kernels._step._packing import codes_of, from_codes
from narrowgauge.kernels._tables import sent_anew
from narrowgauge.kernels._triton import instructions

_PLACE = tl.constexpr(len(Place._fields) + 1)  # a parameter's numbers, and its first program
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _place(places, owners):
    """This program's parameter, and which of its programs this is."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    place = places + owner.to(tl.int64) * _PLACE
    return place, program - tl.load(place + 6).to(tl.int32), owner


@triton.jit
def _load(pointer, first, n, BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of words, n of those from `first` on, and zeros."""
    # Stated where the sum is made: the compiler forgets it of a function's arguments.
    pointer = tl.multiple_of(pointer + first, 16) if ALIGNED else pointer + first
    column = tl.arange(0, SIZE)[None, :]
    at = tl.arange(0, ROWS)[:, None] * BLOCK + column
    if n >= ROWS * BLOCK and BLOCK == SIZE:
        found = tl.load(pointer + at)
    else:
        found = tl.load(pointer + at, mask=(at < n) & (column < BLOCK), other=0)
    return found


@triton.jit
def _store(
    pointer, first, x, n, BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store such a tile."""
    pointer = tl.multiple_of(pointer + first, 16) if ALIGNED else pointer + first
    column = tl.arange(0, SIZE)[None, :]
    at = tl.arange(0, ROWS)[:, None] * BLOCK + column
    if n >= ROWS * BLOCK and BLOCK == SIZE:
        tl.store(pointer + at, x)
    else:
        tl.store(pointer + at, x, mask=(at < n) & (column < BLOCK))


@triton.jit
def _gradients(
    place, grads, start, n, GRAD: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gradients plus residuals, float32."""
    x = widen(_load(grads, tl.load(place) + start, n, BLOCK, SIZE, ROWS, ALIGNED), GRAD)
    if RESIDUAL != "":
        x += widen(_load(_residual(place, RESIDUAL), start, n, BLOCK, SIZE, ROWS, ALIGNED), RESIDUAL)
    return x


@triton.jit
def _residual(place, RESIDUAL: tl.constexpr):
    address = tl.load(place + 5)
    if RESIDUAL == "fp32":
        residual = address.to(tl.pointer_type(tl.float32))
    else:
        residual = address.to(tl.pointer_type(tl.int16))
    return residual


@triton.jit
def _scale(halves, at, here):
    """Scales of messages, bits, given as halves."""
    low = tl.load(halves + at, mask=here, other=0).to(tl.int32)
    high = tl.load(halves + at + 1, mask=here, other=0).to(tl.int32)
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _decode(
    codes, halves, row, index, here, pitch, codes_at, values,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Blocks `index` (ROWS, 1) of the messages `row` as numbers; zeros beyond a block.

    `pitch` and `codes_at` are counted in words of four codes, and so is `codes`; `halves` are of the same memory.
    """
    quad = tl.arange(0, SIZE // 4)[None, :]
    at = row.to(tl.int64) * pitch + codes_at + index * (BLOCK // 4) + quad
    words = tl.load(codes + at, mask=here & (quad < BLOCK // 4), other=0)
    scale = float_of(_scale(halves, row.to(tl.int64) * pitch * (BITS // 4) + 2 * index, here))
    if BITS == 8:
        code = codes_of(words)
    else:
        word = words.to(tl.int32)
        spread = (word & 0xF) | ((word & 0xF0) << 4) | ((word & 0xF00) << 8) | ((word & 0xF000) << 12)
        code = codes_of(spread)
    x = float_of(gather(values, code)) * scale
    if BLOCK != SIZE:
        x = tl.where(tl.arange(0, SIZE)[None, :] < BLOCK, x, 0.0)
    return x


@triton.jit
def _over_scale(x, ABSOLUTE: tl.constexpr):
    """x over its blocks' scales, and the bits of these, NaN where a block is not finite."""
    y, scale, rare = fast_normalize(x, True, ABSOLUTE)
    one = tl.where((x < 0) == (scale < 0), 1.0, -1.0)
    y = tl.where(tl.abs(x) == tl.abs(scale), one, y)
    # Zeros are an ordinary block, and over zero no numbers.
    y = tl.where(scale == 0, 0.0, y)
    bits = tl.where(scale == 0, 0, bits_of(scale))
    if any_of(rare):
        y, scale = normalize(x, True, ABSOLUTE)
        peak = column_max(bits_of(x) & 0x7FFFFFFF)
        bits = tl.where(scale == 0, 0, bits_of(scale))
        bits = tl.where(peak >= INFINITY, _NAN, bits)
    return y, bits


@triton.jit
def _nearest(y, table, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """Codes of the nearest values: by a table's cells, or by eight comparisons if there are none (FIRST is -1)."""
    if FIRST >= 0:
        bits = bits_of(y)
        key = tl.minimum(tl.maximum(((bits >> 16) & 0x7FFF) - FIRST, 0), 0x3F80 - FIRST)
        code = (gather(table, key) + (bits & 0xFFFF)) >> 16
        code = tl.where(bits < 0, tl.maximum(ZERO - code, 0), ZERO + code)
    else:
        code = tl.zeros(y.shape, tl.int32)
        for question in tl.static_range(8):
            above = y > float_of(gather(table, code + ((128 >> question) - 1)))
            code += tl.where(above, 128 >> question, 0)
    return code


@triton.jit
def _stochastic(y, code, values, random, COUNT: tl.constexpr):
    """One of the two values around y, the upper one with the probability of y's place in the gap; `code` is the
    nearest."""
    low = tl.maximum(code - (float_of(gather(values, code)) > y).to(tl.int32), 0)
    low = tl.minimum(low, COUNT - 2)
    bottom = float_of(gather(values, low)).to(tl.float64)
    gap = float_of(gather(values, low + 1)).to(tl.float64) - bottom
    uniform = (random >> 8).to(tl.int32).to(tl.float64) * (2.0**-24)
    return low + 1 - (uniform >= (y.to(tl.float64) - bottom) / gap).to(tl.int32)


@triton.jit
def _random_bits(start, stream, step, sender, seed, above, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """32 random bits for each element of blocks that begin at elements `start` (ROWS, 1)."""
    c0 = (start // 4 + tl.arange(0, SIZE // 4)[None, :]).to(tl.uint32)
    c1, c2, c3 = stream.to(tl.uint32), step.to(tl.uint32), sender.to(tl.uint32)
    a, b, c, d = _philox(c0, c1, c2, c3, seed.to(tl.uint32), above.to(tl.uint32))
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape([ROWS, SIZE])


@triton.jit
def _write(
    x, codes, halves, row, index, here, pitch, codes_at, values, table, start, stream, step, sender, seed, above,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr,
    ZERO: tl.constexpr, ABSOLUTE: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A tile as blocks `index` of the messages `row`; see `_decode`."""
    y, scale = _over_scale(x, ABSOLUTE)
    code = _nearest(y, table, FIRST, ZERO)
    if STOCHASTIC:
        random = _random_bits(start, stream, step, sender, seed, above, SIZE, ROWS)
        code = _stochastic(y, code, values, random, COUNT)
    words = from_codes(code)
    if BITS == 4:
        words = (words & 0xF) | ((words >> 4) & 0xF0) | ((words >> 8) & 0xF00) | ((words >> 12) & 0xF000)
        words = words.to(tl.int16)
    quad = tl.arange(0, SIZE // 4)[None, :]
    at = row.to(tl.int64) * pitch + codes_at + index * (BLOCK // 4) + quad
    tl.store(codes + at, words, mask=here & (quad < BLOCK // 4))
    half = halves + row.to(tl.int64) * pitch * (BITS // 4) + 2 * index
    tl.store(half, scale.to(tl.int16), mask=here)
    tl.store(half + 1, (scale >> 16).to(tl.int16), mask=here)


_PLAIN = ["ranks", "rank", "seed", "above", "step"]


@triton.jit(do_not_specialize=_PLAIN)
def encode(
    places, owners, grads, codes, halves, values, table, pitch, codes_at, ranks, rank, seed, above, step,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr,
    ZERO: tl.constexpr, ABSOLUTE: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr,
    GRAD: tl.constexpr, RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One message for each rank, of all parameters' gradients."""
    place, unit, _ = _place(places, owners)
    per = (tl.load(place + 2) // BLOCK).to(tl.int32)
    block = unit * ROWS + tl.arange(0, ROWS)[:, None]
    start = unit.to(tl.int64) * (ROWS * BLOCK)
    x = _gradients(place, grads, start, tl.load(place + 1) - start, GRAD, RESIDUAL, BLOCK, SIZE, ROWS, ALIGNED)
    index = (tl.load(place + 3) // BLOCK) + block % per
    _write(
        x, codes, halves, block // per, index, block < per * ranks, pitch, codes_at, values, table,
        block.to(tl.int64) * BLOCK, tl.load(place + 4), step, rank + 1, seed, above,
        BLOCK, SIZE, ROWS, BITS, FIRST, ZERO, ABSOLUTE, STOCHASTIC, COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def add(
    places, owners, codes_in, halves_in, codes, halves, total, flags, values, table, pitch, codes_at, ranks, rank,
    seed, above, step,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr,
    ZERO: tl.constexpr, ABSOLUTE: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr,
    TOTAL: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' messages, in the order of ranks, as a message, and itself with TOTAL, which also clears
    the flags for `find_nonfinite`."""
    place, unit, owner = _place(places, owners)
    shard, column = tl.load(place + 2), tl.load(place + 3)
    block = unit * ROWS + tl.arange(0, ROWS)[:, None]
    here = block < shard // BLOCK
    index = column // BLOCK + block
    none = block * 0
    x = _decode(codes_in, halves_in, none, index, here, pitch, codes_at, values, BLOCK, SIZE, ROWS, BITS)
    for other in range(1, ranks):
        x += _decode(
            codes_in, halves_in, none + other, index, here, pitch, codes_at, values, BLOCK, SIZE, ROWS, BITS
        )
    if TOTAL:
        first = unit.to(tl.int64) * (ROWS * BLOCK)
        _store(total, column + first, x, shard - first, BLOCK, SIZE, ROWS, True)
        tl.store(flags + owner, 0, mask=unit == 0)
    start = rank.to(tl.int64) * shard + block.to(tl.int64) * BLOCK
    _write(
        x, codes, halves, none, index, here, pitch, codes_at, values, table, start, tl.load(place + 4), step,
        rank * 0, seed, above, BLOCK, SIZE, ROWS, BITS, FIRST, ZERO, ABSOLUTE, STOCHASTIC, COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ranks"])
def find_nonfinite(
    places, owners, halves, flags, pitch, ranks,
    BLOCK: tl.constexpr, BITS: tl.constexpr, GRAD: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Flag parameters whose mean is not finite. Each block has an element as large as its scale."""
    place, unit, owner = _place(places, owners)
    per = (tl.load(place + 2) // BLOCK).to(tl.int32)
    block = unit * MANY + tl.arange(0, MANY)
    at = (block // per).to(tl.int64) * pitch * (BITS // 4) + 2 * (tl.load(place + 3) // BLOCK + block % per)
    most = tl.abs(float_of(_scale(halves, at, block < per * ranks)))
    mean = widen(narrow(tl.div_rn(most, ranks.to(tl.float32)), GRAD), GRAD)
    if tl.max((bits_of(mean) & 0x7FFFFFFF), 0) >= INFINITY:
        tl.store(flags + owner, 1)


@triton.jit(do_not_specialize=["ranks", "rank"])
def finish(
    places, owners, grads, codes_sent, halves_sent, codes, halves, total, flags, values, pitch, codes_at, ranks,
    rank,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    GRAD: tl.constexpr, RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The sums' means in the gradients' place, and with error feedback the new residual."""
    place, unit, owner = _place(places, owners)
    per = (tl.load(place + 2) // BLOCK).to(tl.int32)
    block = unit * ROWS + tl.arange(0, ROWS)[:, None]
    here, row = block < per * ranks, block // per
    column = tl.load(place + 3)
    index = column // BLOCK + block % per
    start = unit.to(tl.int64) * (ROWS * BLOCK)
    n = tl.load(place + 1) - start
    by = ranks.to(tl.float32)
    x = _decode(codes, halves, row, index, here, pitch, codes_at, values, BLOCK, SIZE, ROWS, BITS)
    mean = narrow(tl.div_rn(x, tl.broadcast_to(by, x.shape)), GRAD)
    if RESIDUAL != "":  # noqa: SIM102  # compile time outside, run time inside: there may be no flags
        if tl.load(flags + owner) == 0:
            lost = _gradients(place, grads, start, n, GRAD, RESIDUAL, BLOCK, SIZE, ROWS, ALIGNED)
            lost -= _decode(
                codes_sent, halves_sent, row, index, here, pitch, codes_at, values, BLOCK, SIZE, ROWS, BITS
            )
            own = here & (row == rank)
            if any_of(own):
                inside = tl.arange(0, SIZE)[None, :]
                at = column + (block % per).to(tl.int64) * BLOCK + inside
                sums = tl.load(total + at, mask=own & (inside < BLOCK), other=0.0)
                lost = tl.where(own, lost + (sums - widen(mean, GRAD) * by), lost)
            _store(_residual(place, RESIDUAL), start, narrow(lost, RESIDUAL), n, BLOCK, SIZE, ROWS, ALIGNED)
    _store(grads, tl.load(place) + start, mean, n, BLOCK, SIZE, ROWS, ALIGNED)


# Elements a program, eight a thread: 16 bytes of bf16. A warp then has blocks of 256 to itself.
_TILE, _EACH, _MOST_WARPS = 1024, 256, 16
_SCALES = 1024  # a program, where only those are read

_ENCODE, _ADD, _FIND_NONFINITE, _FINISH = map(CachedKernel, (encode, add, find_nonfinite, finish))


class TritonAllreduce:
    """The three passes, compiled for a key; see `_c_allreduce.CAllreduce`.

    Raises:
        Unavailable: if there are no kernels of this key.
    """

    def __init__(self, key: AllreduceKey) -> None:
        if (why := key.unsupported()) is not None:
            raise Unavailable(why)
        self.key, table = key, key.table
        size = triton.next_power_of_2(key.block)
        rows = max(1, _TILE // size)
        self.unit = rows
        self.tile = {"BLOCK": key.block, "SIZE": size, "ROWS": rows, "BITS": key.bits}
        self.coding: dict[str, Any] = {
            "FIRST": -1 if table is None else table.first, "ZERO": 0 if table is None else table.zero,
            "ABSOLUTE": key.coder.lowest == -1, "STOCHASTIC": key.stochastic, "COUNT": len(key.coder.values),
        }  # fmt: skip
        warps = min(_MOST_WARPS, max(1, size * rows // _EACH))
        # No kernel needs more; without the limit the compiler spilled one register in a kernel that takes 56.
        most = {"maxnreg": 128} if instructions()[0] else {}  # other compilers have no such option
        self.options = {"num_warps": warps, "enable_fp_fusion": False, **most}
        self.grad, self.residual = KINDS[key.dtype], "" if key.residual is None else KINDS[key.residual]

    def bucket(self, places: Sequence[Place], numbers: BucketNumbers, device: torch.device) -> TritonBucket:
        """See `_c_allreduce.CAllreduce.bucket`."""
        return TritonBucket(self, places, numbers, device)

    def bound(
        self, kernel: CachedKernel, programs: tuple[Tensor, Tensor], sizes: tuple[int, ...], constants: Any
    ) -> BoundLaunch:
        """The launch of a kernel with these programs, as `_placed` returns them."""
        return BoundLaunch(kernel, (programs[1].numel(),), sizes, constants, self.options)


class TritonBucket:
    """The three passes of a bucket, on one stream; its methods are those of `CBucket`.

    Its tables are on the device, so a pass costs the host its launches and little more.
    """

    def __init__(
        self, made: TritonAllreduce, places: Sequence[Place], numbers: BucketNumbers, device: torch.device
    ) -> None:
        key, ranks = made.key, numbers.ranks
        self._bits, self._feedback = key.bits, key.residual is not None
        self._codebook = _codebook(key, device)
        self._flags = None
        word = key.bits // 2
        scales = 4 * (numbers.width // key.block)
        # Of a message, and of its scales, in words of four codes.
        sizes = (scales + numbers.width * key.bits // 8) // word, scales // word
        plain = ranks, numbers.rank
        random = *plain, _signed(numbers.seed), _signed(numbers.seed >> 32)
        aligned = all(place.begin % 8 == 0 and place.residual % 16 == 0 for place in places)
        dtypes = {"GRAD": made.grad, "RESIDUAL": made.residual, "ALIGNED": aligned}
        self._whole = _placed(places, key.block, ranks, made.unit, device)
        self._shard = _placed(places, key.block, 1, made.unit, device)
        coding = made.tile | made.coding
        self._encode = made.bound(_ENCODE, self._whole, (*sizes, *random), coding | dtypes)
        self._add = made.bound(_ADD, self._shard, (*sizes, *random), coding | {"TOTAL": self._feedback})
        self._finish = made.bound(_FINISH, self._whole, (*sizes, *plain), made.tile | dtypes)
        if self._feedback:
            self._scales = _placed(places, key.block, ranks, _SCALES, device)
            constants = {"BLOCK": key.block, "BITS": key.bits, "GRAD": made.grad, "MANY": _SCALES}
            self._find = made.bound(_FIND_NONFINITE, self._scales, (sizes[0], ranks), constants)
            with torch.inference_mode(False):
                self._flags = torch.empty(len(places), dtype=torch.int32, device=device)

    def encode(self, grads: Tensor, sent: Tensor, step: int) -> None:
        given = *self._whole, grads, sent, sent, *self._codebook
        self._launch(self._encode, given, "  gch  ", (_signed(step),))

    def add(self, received: Tensor, sent: Tensor, total: Tensor | None, step: int) -> None:
        given = *self._shard, received, received, sent, sent, total, self._flags, *self._codebook
        self._launch(self._add, given, "  chch    ", (_signed(step),))

    def finish(self, grads: Tensor, sent: Tensor, received: Tensor, total: Tensor | None) -> None:
        if self._feedback:
            self._launch(self._find, (*self._scales, received, self._flags), "  h ")
        given = *self._whole, grads, sent, sent, received, received, total, self._flags, self._codebook[0]
        self._launch(self._finish, given, "  gchch   ")

    def _launch(
        self, launch: BoundLaunch, given: tuple[Tensor | None, ...], words: str, numbers: tuple[int, ...] = ()
    ) -> None:
        """Launch with tensors; a letter for each says how the kernel reads it: see `_as_words`."""
        addresses = tuple([0 if x is None else x.data_ptr() for x in given])
        bits = self._bits

        def arguments() -> tuple[Any, ...]:
            return tuple(_as_words(x, word, bits) for x, word in zip(given, words, strict=True))

        first = given[0]
        launch(-1 if first is None else first.get_device(), addresses, arguments, (), numbers)


def _placed(
    places: Sequence[Place], block: int, ranks: int, blocks: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The table of places, and the parameter of each program; a program takes `blocks` blocks of `ranks` shards."""
    counts = np.array([-(-place.width // block * ranks // blocks) for place in places])
    rows = np.column_stack([table_of(places), np.cumsum(counts) - counts])
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    # Sent by the launching stream, so no other stream has to be waited for.
    return sent_anew(rows, device), sent_anew(owners, device)


@functools.lru_cache(maxsize=64)
def _codebook(key: AllreduceKey, device: torch.device) -> tuple[Tensor, Tensor]:
    """The value of each code, and what encodes: a table's cells or boundaries."""
    found = key.boundaries if key.table is None else key.table.cells.view(np.int32)
    with torch.inference_mode(False):
        return torch.from_numpy(key.values.copy()).to(device), torch.from_numpy(found).to(device)


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _as_words(x: Tensor | None, word: str, bits: int) -> Tensor | None:
    """A tensor as kernels load it: gradients (g) of 16 bits as integers, messages by words of four codes (c) or by
    halves of scales (h), anything else as it is."""
    if x is None or word == " " or (word == "g" and x.dtype == torch.float32):
        return x
    if word == "g":
        return x.view(torch.int16)
    return x.view(-1).view(torch.int32 if word == "c" and bits == 8 else torch.int16)
