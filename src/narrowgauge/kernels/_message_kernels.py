# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Passes of compressed gradients on a GPU: each one launch over all parameters of a bucket.

The specification is `narrowgauge.distributed._compressed_passes`, bit for bit. A program takes a tile (blocks,
elements of a block) of one parameter; which, stands in a list of owners, and where it lies in a table of places
(see `_message_kind`). Blocks are of any multiple of 4 elements, tiles of powers of two: what lies beyond a block
counts as zero. Messages are read and written by words that hold four codes, which lie at multiples of their size;
scales need not, where a code has 4 bits, and go by halves.

The last pass asks first whether each parameter's mean is finite: one more launch, over scales alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._message_kind import Place
from narrowgauge.kernels._step._codebooks import fast_normalise, normalise
from narrowgauge.kernels._step._floats import INFINITY, any_of, bits_of, column_max, float_of, gather, narrow, widen
from narrowgauge.kernels._step._packing import codes_of, from_codes
from narrowgauge.kernels._step._random import _philox

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
    # Said where the sum is made: of what a function is given, the compiler forgets it.
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
    """The same back."""
    pointer = tl.multiple_of(pointer + first, 16) if ALIGNED else pointer + first
    column = tl.arange(0, SIZE)[None, :]
    at = tl.arange(0, ROWS)[:, None] * BLOCK + column
    if n >= ROWS * BLOCK and BLOCK == SIZE:
        tl.store(pointer + at, x)
    else:
        tl.store(pointer + at, x, mask=(at < n) & (column < BLOCK))


@triton.jit
def _gradients(
    place, grads, start, n, GRAD: tl.constexpr, MEMORY: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gradients with what is remembered of them, float32."""
    x = widen(_load(grads, tl.load(place) + start, n, BLOCK, SIZE, ROWS, ALIGNED), GRAD)
    if MEMORY != "":
        x += widen(_load(_memory(place, MEMORY), start, n, BLOCK, SIZE, ROWS, ALIGNED), MEMORY)
    return x


@triton.jit
def _memory(place, MEMORY: tl.constexpr):
    address = tl.load(place + 5)
    if MEMORY == "fp32":
        memory = address.to(tl.pointer_type(tl.float32))
    else:
        memory = address.to(tl.pointer_type(tl.int16))
    return memory


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
    y, scale, unusual = fast_normalise(x, True, ABSOLUTE)
    one = tl.where((x < 0) == (scale < 0), 1.0, -1.0)
    y = tl.where(tl.abs(x) == tl.abs(scale), one, y)
    # Zeros are an ordinary block, and over zero no numbers.
    y = tl.where(scale == 0, 0.0, y)
    bits = tl.where(scale == 0, 0, bits_of(scale))
    if any_of(unusual):
        y, scale = normalise(x, True, ABSOLUTE)
        peak = column_max(bits_of(x) & 0x7FFFFFFF)
        bits = tl.where(scale == 0, 0, bits_of(scale))
        bits = tl.where(peak >= INFINITY, _NAN, bits)
    return y, bits


@triton.jit
def _nearest(y, table, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """Codes of the nearest values: by a table's cells, or by eight questions if there are none (FIRST is -1)."""
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
def _by_chance(y, code, values, random, COUNT: tl.constexpr):
    """One of the two values around y, the nearest of which is known: the upper one with y's share of the gap."""
    low = tl.maximum(code - (float_of(gather(values, code)) > y).to(tl.int32), 0)
    low = tl.minimum(low, COUNT - 2)
    bottom = float_of(gather(values, low)).to(tl.float64)
    gap = float_of(gather(values, low + 1)).to(tl.float64) - bottom
    uniform = (random >> 8).to(tl.int32).to(tl.float64) * (2.0**-24)
    return low + 1 - (uniform >= (y.to(tl.float64) - bottom) / gap).to(tl.int32)


@triton.jit
def _words_of_chance(start, stream, step, sender, seed, above, SIZE: tl.constexpr, ROWS: tl.constexpr):
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
        random = _words_of_chance(start, stream, step, sender, seed, above, SIZE, ROWS)
        code = _by_chance(y, code, values, random, COUNT)
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
    GRAD: tl.constexpr, MEMORY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One message for each rank, of all parameters' gradients."""
    place, unit, _ = _place(places, owners)
    per = (tl.load(place + 2) // BLOCK).to(tl.int32)
    block = unit * ROWS + tl.arange(0, ROWS)[:, None]
    start = unit.to(tl.int64) * (ROWS * BLOCK)
    x = _gradients(place, grads, start, tl.load(place + 1) - start, GRAD, MEMORY, BLOCK, SIZE, ROWS, ALIGNED)
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
    """The sum of all ranks' messages, one rank after the other, as a message; and as it is, if asked for. Then it
    makes flags ready for `look`."""
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
def look(
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
    GRAD: tl.constexpr, MEMORY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The sums' means in the gradients' place, and what this rank's messages lost of them, if it is remembered."""
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
    if MEMORY != "":  # noqa: SIM102  # what is compiled, and what is asked: there may be no flags
        if tl.load(flags + owner) == 0:
            lost = _gradients(place, grads, start, n, GRAD, MEMORY, BLOCK, SIZE, ROWS, ALIGNED)
            lost -= _decode(
                codes_sent, halves_sent, row, index, here, pitch, codes_at, values, BLOCK, SIZE, ROWS, BITS
            )
            own = here & (row == rank)
            if any_of(own):
                inside = tl.arange(0, SIZE)[None, :]
                at = column + (block % per).to(tl.int64) * BLOCK + inside
                sums = tl.load(total + at, mask=own & (inside < BLOCK), other=0.0)
                lost = tl.where(own, lost + (sums - widen(mean, GRAD) * by), lost)
            _store(_memory(place, MEMORY), start, narrow(lost, MEMORY), n, BLOCK, SIZE, ROWS, ALIGNED)
    _store(grads, tl.load(place) + start, mean, n, BLOCK, SIZE, ROWS, ALIGNED)
