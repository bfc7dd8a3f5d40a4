# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""SRAM-Quantiles on the GPU: each program sorts subsets of 4096 elements in its registers and sums what it reads.

What is computed, and why so, is in `narrowgauge.storage._quantiles`; here is how it is made fast. Sorting 4096
keys with a bitonic network takes 78 stages, in each of which every key meets the partner whose position differs
in one bit. What a stage costs depends on where that bit lives:

- in a register of the same thread: one integer minimum or maximum an element;
- in the lane of the same warp: a shuffle, a compare, a select;
- in another warp: a trip through shared memory and a barrier.

The network meets bit d in 12 - d of its stages, and the order in which a subset's elements enter it is free, for
they are about to be sorted. So the network's low bits are laid on the bits that the loaded tile keeps in registers
and its high bits on lanes and warps (`_network_axes`): with one warp, 128 keys a thread, 63 of the 78 stages stay
in a thread and none leaves the warp. The upper half of a bitonic merge runs downwards; where the bit that says so
lives in lanes, complementing the keys once makes the whole merge run upwards, so that a register stage remains a
single minimum or maximum. In all that is some 110 integer operations an element, 0.0075 ns at the 64 a clock that
an H200's multiprocessor has to offer.

Keys are the bits of the float32 value as an integer that orders as the float does; a missing element is +inf. Two
neighboring order statistics are read for each quantile and weighted by whole numbers, so that products are exact
in float64 and a compiler may contract them or not: the sums are the specification's, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = tl.constexpr(16)  # contiguous elements that go to a subset together
STRIPES = tl.constexpr(256)  # pieces a subset has
SUBSET = tl.constexpr(4096)

_BITS = tl.constexpr(12)  # of a position within a subset
# ns an element, 2^28 of float32 on an H200: 0.0144 with 1 warp, 0.0190 with 2, 0.0312 with 4, whose exchanges
# between warps meet bank conflicts. More keys a thread make a longer program: 8 s to compile, against 2 s with 4.
_WARPS = 1
_MEAN_TILE = 2**14  # float64 sums that eight warps hold in registers, 64 a thread


@triton.jit
def _shift(stripe, subsets):
    """By how many places the subsets are rotated within a stripe: murmur3's finalizer, scaled to [0, subsets)."""
    bits = stripe.to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    return ((bits.to(tl.uint64) * subsets.to(tl.uint64)) >> 32).to(tl.int32)


@triton.jit
def _piece(stripe, shift, subset, subsets):
    """Which piece of the tensor the subset takes from a stripe."""
    place = subset + shift
    return stripe.to(tl.int64) * subsets + tl.where(place >= subsets, place - subsets, place)


@triton.jit
def _flip(bits):
    """Between the bits of a float32 and an integer of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bit(axis: tl.constexpr):
    """The coordinate, 0 or 1, along one axis of the hypercube."""
    return tl.arange(0, 2).reshape([1] * axis + [2] + [1] * (_BITS - 1 - axis))


@triton.jit
def _narrow(integers):
    # The interpreter's sums of int32 are int64 inside; compiled, the two casts fold away.
    return integers.to(tl.int64).to(tl.int32)


@triton.jit
def _exchange(keys, downwards, axis: tl.constexpr):
    """One stage: each key meets its neighbor along the axis and keeps the smaller or the larger of the two."""
    other = tl.sum(keys, axis, keep_dims=True) - keys
    upper = _bit(axis) == 1
    return tl.where((keys > other) != (upper != downwards), other, keys)


@triton.jit
def _sort(keys, AXES: tl.constexpr, REGISTERS: tl.constexpr):
    """Bitonic sort of a hypercube: the rank's bits, highest first, run along AXES, the last ones in registers."""
    # The last merges share one loop: unrolled, the program is twice as long, and takes 0.0166 ns instead of 0.0144.
    LAST: tl.constexpr = _BITS - 1
    upwards = tl.zeros([1] * _BITS, tl.int1)
    above = tl.zeros([1] * _BITS, tl.int32)
    for bit in tl.static_range(REGISTERS, _BITS):
        above += _bit(AXES[LAST - bit]) << (bit - REGISTERS)
    for level in tl.static_range(1, REGISTERS):
        for step in tl.static_range(level):
            keys = _exchange(keys, _bit(AXES[LAST - level]) == 1, AXES[_BITS - level + step])
    for level in range(REGISTERS, _BITS + 1):
        complement = -((above >> (level - REGISTERS)) & 1)
        keys ^= complement
        for step in tl.static_range(_BITS - REGISTERS):
            if LAST - step < level:
                keys = _exchange(keys, upwards, AXES[step])
        for step in tl.static_range(_BITS - REGISTERS, _BITS):
            keys = _exchange(keys, upwards, AXES[step])
        keys ^= complement
    return keys


@triton.jit
def _line_up(keys, A: tl.constexpr):
    """The sorted hypercube as a table (STRIPES, PIECE) that ascends row by row."""
    keys = tl.permute(keys, [A[0], A[1], A[2], A[3], A[4], A[5], A[6], A[7], A[8], A[9], A[10], A[11]])
    return tl.reshape(keys, [STRIPES, PIECE])


@triton.jit
def _column(table, column: tl.constexpr):
    """One column of float32 bits, as float64."""
    columns = tl.arange(0, table.shape[1])[None, :]
    bits = _narrow(tl.sum(tl.where(columns == column, table, 0), 1))
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _read(line, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """2 * COUNT times each quantile of the first `size` of the sorted float32 bits in memory at `line`."""
    place = (2 * tl.arange(0, BLOCK) + 1) * size + COUNT
    rank = place // (2 * COUNT)
    weight = place - rank * (2 * COUNT)
    # A weight of zero would turn an infinite neighbor into NaN.
    above = tl.where(weight == 0, rank, rank + 1)
    weight = tl.where(weight == 0, COUNT, weight)
    below = tl.minimum(tl.maximum(rank, 1), size) - 1
    above = tl.minimum(tl.maximum(above, 1), size) - 1
    lower = tl.load(line + below).to(tl.float32, bitcast=True).to(tl.float64)
    upper = tl.load(line + above).to(tl.float32, bitcast=True).to(tl.float64)
    return lower * (2 * COUNT - weight) + upper * weight


@triton.jit(do_not_specialize=["n", "subsets", "rows"])
def _subset_quantile_sums(
    x_ptr, sums_ptr, sorted_ptr, n, subsets, rows,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Row r of sums (rows, COUNT): 2 * COUNT times the quantiles of subsets r, r + rows, ..., added in turn."""
    # Where quantiles divide a subset evenly, each lies midway between the middle two of its run of sorted values.
    EVEN: tl.constexpr = SUBSET % (2 * COUNT) == 0
    row = tl.program_id(0)
    line = sorted_ptr + row.to(tl.int64) * SUBSET
    stripe = tl.arange(0, STRIPES)
    within = tl.arange(0, PIECE)[None, :]
    shift = _shift(stripe, subsets)
    last = tl.full([], STRIPES - 1, tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    nan = tl.zeros([STRIPES], tl.int32)
    subset = row
    # Not a range: the interpreter of Triton 3.6 cannot count to a tensor under numpy 2.4.
    while subset < subsets:
        piece = _piece(stripe, shift, subset, subsets)
        pointers = x_ptr + (piece * PIECE)[:, None] + within
        # The pieces of a stripe all lie before those of the next: with its last a subset has all.
        if (_piece(last, _shift(last, subsets), subset, subsets) + 1) * PIECE <= n:
            size = tl.full([], SUBSET, tl.int32)
            values = tl.load(pointers).to(tl.float32)
        else:
            present = tl.minimum(tl.maximum(n - piece * PIECE, 0), PIECE).to(tl.int32)
            size = _narrow(tl.sum(present, 0))
            values = tl.load(pointers, mask=within < present[:, None], other=float("inf")).to(tl.float32)
        keys = tl.reshape(_flip(values.to(tl.int32, bitcast=True)), [2] * _BITS)
        bits = _flip(_narrow(_line_up(_sort(keys, AXES, REGISTERS), AXES)))
        # NaN lie at the ends of this order: above +inf, or below -inf if their sign is set.
        nan |= (_column(bits, 0) != _column(bits, 0)).to(tl.int32)
        nan |= (_column(bits, PIECE - 1) != _column(bits, PIECE - 1)).to(tl.int32)
        if EVEN and size == SUBSET:
            RUN: tl.constexpr = SUBSET // COUNT
            runs = tl.reshape(bits, [COUNT, RUN])
            total += _column(runs, RUN // 2 - 1) * COUNT + _column(runs, RUN // 2) * COUNT
        else:
            # Through memory: a gather from 128 registers a thread would be as long a program as the sort.
            tl.store(line + tl.arange(0, SUBSET), tl.reshape(bits, [SUBSET]))
            tl.debug_barrier()
            total += _read(line, size, COUNT, BLOCK)
            tl.debug_barrier()
        subset += rows
    total = tl.where(tl.max(nan, 0) > 0, float("nan"), total)
    quantile = tl.arange(0, BLOCK)
    tl.store(sums_ptr + row.to(tl.int64) * COUNT + quantile, total, mask=quantile < COUNT)


@triton.jit(do_not_specialize=["subsets", "rows"])
def _mean(sums_ptr, means_ptr, subsets, rows, COUNT: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """The mean from sums (rows, COUNT): rows are added by halves, the upper to the lower, up from 2^LEVELS."""
    row = tl.arange(0, 2**LEVELS)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.load(sums_ptr + row * COUNT + column, mask=(row < rows) & (column < COUNT), other=0.0)
    for level in tl.static_range(LEVELS):
        total = tl.sum(tl.reshape(total, [2, 2 ** (LEVELS - 1 - level), BLOCK]), 0)
    mean = (total / (2.0 * COUNT * subsets.to(tl.float64))).to(tl.float32) + 0.0
    tl.store(means_ptr + column, mean, mask=column < COUNT)


def _network_axes(itemsize: int) -> tuple[tuple[int, ...], int]:
    """For each bit of the rank, highest first, an axis of the hypercube; and how many of the last are in registers.

    Triton deals a row-major tile out in 16-byte vectors: the lowest bits of the position go to a thread's
    registers, the next five to lanes, the next to warps, the rest to registers again. Results do not depend on it.
    """
    axes = list(range(_BITS.value))
    lanes = _BITS.value - ((16 // itemsize).bit_length() - 1)
    warps = lanes - 5
    rest = warps - (_WARPS.bit_length() - 1)
    registers = axes[:rest] + axes[lanes:]
    return tuple(axes[rest:lanes] + registers), len(registers)


def mean_subset_quantiles(x: Tensor, count: int, *, subsets: int, rows: int) -> Tensor:
    """Quantiles of each subset, averaged over the subsets.

    Args:
        x: contiguous tensor of float16, bfloat16, float32 or float64 on the GPU, of at least one element.
        count: quantiles, at most 4096.
        subsets: ceil(elements / 4096).
        rows: running sums, at most `subsets` and at most 4096; row r adds up every rows-th subset from r on.

    Returns:
        float32 tensor (count,), NaN where x has one.
    """
    sums = torch.empty(rows, count, dtype=torch.float64, device=x.device)
    in_order = torch.empty(rows, SUBSET.value, dtype=torch.int32, device=x.device)
    means = torch.empty(count, dtype=torch.float32, device=x.device)
    axes, registers = _network_axes(x.element_size())
    levels = (rows - 1).bit_length()
    block = min(_MEAN_TILE >> levels, triton.next_power_of_2(count))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _subset_quantile_sums[(rows,)](
            x, sums, in_order, x.numel(), subsets, rows,
            COUNT=count, BLOCK=triton.next_power_of_2(count), AXES=axes, REGISTERS=registers, num_warps=_WARPS,
        )  # fmt: skip
        _mean[(triton.cdiv(count, block),)](
            sums, means, subsets, rows, COUNT=count, BLOCK=block, LEVELS=levels, num_warps=8
        )
    return means
