# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""What a step does to a weight, as sums over a tensor: while the numbers are in registers, from what was written.

The specification is `narrowgauge.optim._stats.UpdateStats.measure`. Differences are taken between the words, in
float32: between neighbors, as weights before and after a step are, they are exact, and no further from exact than
2^-24 of themselves elsewhere. A thread adds up its eight elements of a unit and then its units, a program its
threads, in float32: chains of some thirty. Programs are added up in float64, always in the same order.

Counts are of updates that are not zero, and of those among them that changed something. They go together in one
number.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from narrowgauge.kernels._step._floats import ASSEMBLY
from narrowgauge.kernels._step._layout import Layout
from narrowgauge.kernels._step._packing import apart4

# What is kept of a tensor, in the order of `UpdateStats`. A program counts updates that changed something, in the
# place of those that did not, and leaves out the last: how many elements ratios are of.
COLUMNS = tl.constexpr(8)
# A program that adds up has at most this many programs' sums, and takes this many at a time.
SLICE = 1024
_PAGE = tl.constexpr(128)
# Bits of each of the counts that go together in a float: a thread counts 240 elements at most.
FIELD = tl.constexpr(8)

# 1 for what is not zero: infinity times zero is NaN, which saturates to zero.
_THERE = tl.constexpr("{ .reg .f32 t; abs.f32 t, $1; mul.sat.f32 $0, t, 0f7F800000; }")


@triton.jit
def there(x):
    """1 for numbers other than zero, 0 for zero and for NaN."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(_THERE, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return (tl.abs(x) > 0).to(tl.float32)


@triton.jit
def dots(x, y, TOGETHER: tl.constexpr):
    """Sums of products of some neighbors, which a thread has: one fused multiply-add after the other."""
    a, b, c, d = apart4(x)
    e, f, g, h = apart4(y)
    return _all(tl.fma(d, h, tl.fma(c, g, tl.fma(b, f, a * e))), TOGETHER)


@triton.jit
def counts(x, y, z, TOGETHER: tl.constexpr):
    """How many of some neighbors are 1, of each of three, the others 0: fields of one number, x in the lowest."""
    field: tl.constexpr = 2.0**FIELD
    a, b, c, d = apart4(x)
    some = a + b + c + d
    a, b, c, d = apart4(y)
    some = _more(some, a, b, c, d, field)
    if z is not None:
        a, b, c, d = apart4(z)
        some = _more(some, a, b, c, d, field * field)
    return _all(some, TOGETHER)


@triton.jit
def _more(some, a, b, c, d, times: tl.constexpr):
    return tl.fma(d, times, tl.fma(c, times, tl.fma(b, times, tl.fma(a, times, some))))


@triton.jit
def _all(four, TOGETHER: tl.constexpr):
    if TOGETHER == 4:
        return four
    else:
        return tl.sum(four.reshape([four.shape[0], four.shape[1] // 2, 2]), 2)


@triton.jit
def add_slices(sums, ends, slices):
    """Sums of programs `ends[i]` to `ends[i + 1]` of the step, one slice a program."""
    number = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    place, end = tl.load(ends + number), tl.load(ends + number + 1)
    total = tl.zeros([_PAGE, COLUMNS], tl.float64)
    while place < end:
        here = place + tl.arange(0, _PAGE)[:, None]
        total += tl.load(sums + here.to(tl.int64) * COLUMNS + column, mask=here < end, other=0.0).to(tl.float64)
        place += _PAGE
    tl.store(slices + number * COLUMNS + tl.arange(0, COLUMNS), tl.sum(total, 0))


@triton.jit
def add_tensors(
    table, steps, ends, slices, stats, WIDTH: tl.constexpr, NUMEL: tl.constexpr, RATIO: tl.constexpr
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
    if RATIO:
        elements = tl.load(table + tensor * WIDTH + NUMEL)
        row = tl.where(column == 7, tl.where(taken, elements.to(tl.float64), 0.0), row)
    tl.store(stats + tensor * COLUMNS + column, row)


@dataclass(frozen=True)
class Stats:
    """The lines that measure a layout's units after their words have been made, and keep a program's sums."""

    layout: Layout  # nothing is measured unless it says so
    ratio: bool  # whether the rule has a second moment to set the gradient against
    carries: bool  # whether the low word moves weights that the update does not

    @property
    def one(self) -> bool:
        """Whether what is stored is what the model sees: the parameter alone."""
        return self.layout.low is None

    @property
    def names(self) -> list[str]:
        """What a unit gives, and a program adds up."""
        if not self.layout.gauges:
            return []
        seen = [] if self.one else ["visible_dots"]
        return ["squares", "stored_dots", *seen, *(["ratios"] if self.ratio else []), "changes"]

    def unit(self, fast: bool, ratio: tuple[str, ...]) -> list[str]:
        """The sums of a unit after the lines that write its weight; `ratio` is what its ratio is the product of."""
        if not self.layout.gauges:
            return []
        made = ["intended = delta", *(f"ratio = {x}" for x in ratio[:1])]
        if not fast:
            names = ["intended", "stored", "visible", *(["ratio"] if self.ratio else [])]
            made += [f"{name} = tl.where(here, {name}, 0.0)" for name in names]
        sums = {"squares": "intended, intended", "stored_dots": "intended, stored"}
        sums |= {"visible_dots": "intended, visible", "ratios": ", ".join(["ratio", *ratio[1:]])}
        made += [f"{name} = dots({value}, {self._together})" for name, value in sums.items() if name in self.names]
        only = "" if fast and not self.carries else "meant * "
        made += ["meant = there(intended)", f"kept = {only}there(stored)"]
        made += ["shown = None" if self.one else f"shown = {only}there(visible)"]
        return [*made, f"changes = counts(meant, kept, shown, {self._together})"]

    @property
    def _together(self) -> int:
        return min(8, self.layout.vector)

    def begin(self) -> list[str]:
        """The program's sums, at first."""
        zeros = f"tl.zeros([{self.layout.rows}, {self.layout.block // self._together}], tl.float32)"
        return [f"all_{name} = {zeros}" for name in self.names]

    def add(self) -> list[str]:
        """A unit's sums added to the program's."""
        return [f"all_{name} += {name}" for name in self.names]

    def end(self) -> list[str]:
        """The program's sums kept."""
        if not self.layout.gauges:
            return []
        bits = FIELD.value
        fields = [f"(fields >> {i * bits}) & {2**bits - 1}" for i in range(3)]
        columns = ["all_squares", "all_stored_dots", "all_stored_dots" if self.one else "all_visible_dots"]
        columns += [*fields[:2], fields[1 if self.one else 2], *(["all_ratios"] if self.ratio else [])]
        return [
            "fields = all_changes.to(tl.int32)",
            *(
                f"tl.store(gauges + {COLUMNS.value} * program + {i}, tl.sum(tl.sum({x}, 1), 0).to(tl.float32))"
                for i, x in enumerate(columns)
            ),
        ]
