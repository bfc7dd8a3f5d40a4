# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""What a step does to a weight, as sums over a tensor: while the numbers are in registers, from what was written.

The specification is `narrowgauge.optim._stats.UpdateStats.measure`. Differences are taken between the words, in
float32: between neighbours, as weights before and after a step are, they are exact, and no further from exact than
2^-24 of themselves elsewhere. A thread adds up its eight elements of a unit and then its units, a program its
threads, in float32: chains of some thirty. Programs are added up in float64, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import ASSEMBLY, upper, widen
from narrowgauge.kernels._step._packing import apart4
from narrowgauge.kernels._step._sampling import is_sampled, scale
from narrowgauge.kernels._step._weights import bounded_low, join

# What is kept of a tensor, in the order of `UpdateStats`. A program leaves counts of updates that changed something
# in the place of those that did not, and not the last, the elements that the ratios are of.
COLUMNS = tl.constexpr(8)
# A program that adds up has so many programs' sums at the most, and takes so many at a time.
SLICE = 1024
_PAGE = tl.constexpr(128)
# Counts that go together in a float have so many bits each: a thread counts 240 elements at most.
FIELD = tl.constexpr(8)

# 1 for what is not zero: infinity times zero is no number, which saturates to zero.
_THERE = tl.constexpr("{ .reg .f32 t; abs.f32 t, $1; mul.sat.f32 $0, t, 0f7F800000; }")


@triton.jit
def moved(p, low, p_new, low_new, weight, STORAGE: tl.constexpr, KIND: tl.constexpr):
    """(all that is stored, the parameter) after a step less before it, of any words as they lie in memory."""
    seen = widen(p_new, KIND) - widen(p, KIND)
    if STORAGE == "split":
        return join(upper(p_new), low_new.to(tl.int32)) - weight, seen
    elif STORAGE == "split8":
        return join(upper(p_new), low_new.to(tl.int32) << 8) - weight, seen
    elif STORAGE == "master":
        return low_new - weight, seen
    elif STORAGE == "kahan" or STORAGE == "expansion":
        return seen + (bounded_low(p_new, low_new, KIND) - bounded_low(p, low, KIND)), seen
    else:
        return seen, seen


@triton.jit
def there(x):
    """1 for numbers other than zero, 0 for zero and for what is no number."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(_THERE, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return (tl.abs(x) > 0).to(tl.float32)


@triton.jit
def dots(x, y, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """Sums of products of some neighbours, which a thread has: one fused multiply-add after the other."""
    a, b, c, d = apart4(x, ROWS)
    e, f, g, h = apart4(y, ROWS)
    return _all(tl.fma(d, h, tl.fma(c, g, tl.fma(b, f, a * e))), ROWS, TOGETHER)


@triton.jit
def counts(x, y, z, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """How many of some neighbours are 1, of each of three, the others 0: fields of one number, x in the lowest."""
    field: tl.constexpr = 2.0**FIELD
    a, b, c, d = apart4(x, ROWS)
    some = a + b + c + d
    a, b, c, d = apart4(y, ROWS)
    some = _more(some, a, b, c, d, field)
    if z is not None:
        a, b, c, d = apart4(z, ROWS)
        some = _more(some, a, b, c, d, field * field)
    return _all(some, ROWS, TOGETHER)


@triton.jit
def _more(some, a, b, c, d, times: tl.constexpr):
    return tl.fma(d, times, tl.fma(c, times, tl.fma(b, times, tl.fma(a, times, some))))


@triton.jit
def _all(four, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    if TOGETHER == 4:
        return four
    else:
        return tl.sum(four.reshape([ROWS, four.shape[1] // 2, 2]), 2)


@triton.jit
def add_slices(sums, ends, slices, turns, steps):
    """Sums of programs `ends[i]` to `ends[i + 1]` of the step, one slice a program; of those that measured.

    Args:
        sums, ends, slices: what is added up, and where to.
        turns, steps: of `_sampling`; `turns` is None if all of them did.
    """
    number = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    place, end = tl.load(ends + number), tl.load(ends + number + 1)
    total = tl.zeros([_PAGE, COLUMNS], tl.float64)
    while place < end:
        here = place + tl.arange(0, _PAGE)[:, None]
        there = here < end
        if turns is not None:
            there = there & is_sampled(here, turns, steps)
        total += tl.load(sums + here.to(tl.int64) * COLUMNS + column, mask=there, other=0.0).to(tl.float64)
        place += _PAGE
    tl.store(slices + number * COLUMNS + tl.arange(0, COLUMNS), tl.sum(total, 0))


@triton.jit
def add_tensors(
    table, steps, ends, slices, stats, turns,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, NUMEL: tl.constexpr, EACH: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Rows of `stats`: the sums of slices `ends[i]` to `ends[i + 1]`; zeros for a tensor that was left alone."""
    tensor = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    place, end = tl.load(ends + tensor), tl.load(ends + tensor + 1)
    taken = tl.load(steps + tensor) > 0
    end = tl.where(taken, end, place)
    total = tl.zeros([_PAGE, COLUMNS], tl.float64)
    while place < end:
        here = place + tl.arange(0, _PAGE)[:, None]
        total += tl.load(slices + here.to(tl.int64) * COLUMNS + column[None, :], mask=here < end, other=0.0)
        place += _PAGE
    row = tl.sum(total, 0)
    # Of all that were meant those that changed nothing.
    meant = tl.sum(tl.where(column == 3, row, 0.0), 0)
    row = tl.where((column == 4) | (column == 5), meant - row, row)
    elements = tl.load(table + tensor * WIDTH + NUMEL)
    if turns is not None:
        row *= scale(tl.load(table + tensor * WIDTH + FIRST).to(tl.int32), elements, turns, steps, EACH)
    if RATIO:
        row = tl.where(column == 7, tl.where(taken, elements.to(tl.float64), 0.0), row)
    tl.store(stats + tensor * COLUMNS + column, row)
