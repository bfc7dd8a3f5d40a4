"""The text of a step's kernels: `step`, and before it `finite` and `sums` where they are needed.

A program works on one tile of a tensor, unit by unit. `_words` has the lines that bring words from memory and back,
`_unit` those that decode and encode them, `_emit` the equation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowgauge.kernels._graph import Node
from narrowgauge.kernels._step._emit import lines
from narrowgauge.kernels._step._layout import AT, COLUMNS, WIDTH, Layout
from narrowgauge.kernels._step._numbers import indented
from narrowgauge.kernels._step._unit import Rare, decode, encode, in_order, write
from narrowgauge.kernels._step._words import loads, places, pointers, read_words, stores, written_words


def step_source(
    layout: Layout, delta: Node, moments: Mapping[str, Node], reach: Mapping[str, Node], met: Sequence[Node]
) -> str:
    """The kernel `step`.

    Args:
        layout: what it works on.
        delta, moments, reach: the equation.
        met: the numbers among them that a tensor's row of numbers holds, in order.
    """
    known = _inputs(layout) | {node: f"u{i}" for i, node in enumerate(met)}
    handing = [moment for moment in layout.moments if moment.hands_over and moment.name in reach]
    update, names = lines([delta, *moments.values(), *(reach[moment.name] for moment in handing)], known, "x")
    update.append(f"delta = {names[delta]}")

    def unit(rare: Rare | None) -> list[str]:
        body = [*decode(layout, rare), *update]
        for moment in in_order(layout.moments):
            body += encode(layout, moment, names[moments[moment.name]], rare)
        body += [f"delta = delta + ({names[reach[moment.name]]}) * {moment.name}_lost" for moment in handing]
        return body + write(layout, rare)

    rare = Rare()
    usual = unit(rare)
    return _step_kernels(layout, len(met), usual, rare.test(), unit(None))


def sums_source(layout: Layout, terms: Mapping[str, Node], met: Sequence[Node]) -> str:
    """The kernel `sums`: each program's sums of the terms, in float64."""
    known = _inputs(layout) | {node: f"u{i}" for i, node in enumerate(met)}
    made, names = lines(terms.values(), known, "x")
    sums = [f"sum{number}" for number in range(len(terms))]
    body = [*loads(layout), *decode(layout, None), *made]
    for total, node in zip(sums, terms.values(), strict=True):
        body += [f"term = ({names[node]}).to(tl.float64)", "if MASKED:", "    term = tl.where(here, term, 0.0)"]
        body.append(f"{total} += term")
    end = [
        f"tl.store(partials + {len(terms)} * program + {number}, tl.sum(tl.sum({total}, 1), 0))"
        for number, total in enumerate(sums)
    ]
    return _pass_kernel("sums", layout, len(met), dict.fromkeys(sums, "tl.float64"), body, end)


def finite_source(layout: Layout) -> str:
    """The kernel `finite`: flags tensors whose gradient has an infinity or NaN."""
    body = [
        "grad = load(grad_at + unit + at, here, MASKED)",
        f"peak = tl.maximum(peak, bits_of(widen(grad, {layout.grad!r})) & 0x7FFFFFFF)",
    ]
    end = ["if largest(peak) >= INFINITY:", "    tl.store(flags + tensor, 1)"]
    return _pass_kernel("finite", layout, 0, {"peak": "tl.int32"}, body, end)


def _inputs(layout: Layout) -> dict[Node, str]:
    names = ("weight", "grad", *(moment.name for moment in layout.moments))
    return {Node("input", (name,)): f"{name}_in" for name in names}


def _begin(layout: Layout, uniforms: int) -> list[str]:
    """Which tensor a program works on, where its tile begins, and the tensor's numbers and addresses."""
    return [
        "program = tl.program_id(0)",
        "tensor = tl.load(programs + program)",
        f"row = table + tensor * {WIDTH}",
        f"start = (program - tl.load(row + {AT['first']})) * {layout.tile}",
        f"left = tl.minimum(tl.load(row + {AT['numel']}) - start, {layout.tile}).to(tl.int32)",
        f"whole = left // {layout.unit}",
        *(f"u{i} = tl.load(uniforms + {uniforms} * tensor + {i})" for i in range(uniforms)),
        *pointers(layout),
    ]


def _given(layout: Layout, uniforms: int) -> list[str]:
    return [*_books(layout), *(f"u{i}" for i in range(uniforms))]


def _books(layout: Layout) -> list[str]:
    return [f"{kind}{i}" for i in range(len(layout.cells)) for kind in ("values", "cells")]


def _step_kernels(layout: Layout, uniforms: int, usual: list[str], unusual: str, careful: list[str]) -> str:
    """The kernel `step`: one unit after the other, each loaded while the one before it is worked on.

    What has been read of a unit waits in registers as it lay in memory. A unit that is not ordinary, or not whole,
    is not written but noted, and in the end done from the start with care.
    """
    read, written = read_words(layout), written_words(layout)
    at, words = ", ".join(f"{name}_at" for name in read), ", ".join(read)
    made, after = ", ".join(f"{name}_new" for name in written), ", ".join(f"{name}_after" for name in read)
    given = ", ".join(["row", "number", *_given(layout, uniforms)])
    return f"""
@triton.jit
def step_load({at}, unit, left, MASKED: tl.constexpr):
{indented([*places(layout), *loads(layout)], 4)}
    return {words}


@triton.jit
def step_store({at}, {made}, unit, left, MASKED: tl.constexpr):
{indented([*places(layout), *stores(layout)], 4)}


@triton.jit
def step_usual({words}, start, {given}):
{indented(usual, 4)}
    return {made}, {unusual}


@triton.jit
def step_careful({words}, start, left, {given}):
{indented([*places(layout), *careful], 4)}
    return {made}


@triton.jit
def step(table, programs, uniforms, steps, flags, partials{"".join(f", {name}" for name in _books(layout))}):
{indented(_begin(layout, uniforms), 4)}
    number = tl.load(steps + tensor)
    if number > 0:
        again = tl.where(whole * {layout.unit} < left, 1 << whole, 0)
        if whole > 0:
            {words} = step_load({at}, 0, left, False)
            for i in range(whole):
                unit = i * {layout.unit}
                next = tl.minimum(i + 1, whole - 1) * {layout.unit}
                {after} = step_load({at}, next, left, False)
                {made}, unusual = step_usual({words}, start + unit, {given})
                if unusual:
                    again = again | (1 << i)
                else:
                    step_store({at}, {made}, unit, left, False)
                {words} = {after}
        unit = 0
        while again != 0:
            if (again & 1) != 0:
                {words} = step_load({at}, unit, left - unit, True)
                {made} = step_careful({words}, start + unit, left - unit, {given})
                step_store({at}, {made}, unit, left - unit, True)
            again = again >> 1
            unit += {layout.unit}
"""


def _pass_kernel(
    name: str, layout: Layout, uniforms: int, totals: Mapping[str, str], body: list[str], end: list[str]
) -> str:
    """A kernel that reads every unit once: totals start from zero, `body` goes on with them, `end` keeps them."""
    at = [line.split(" = ")[0] for line in pointers(layout)]
    given = ", ".join([*at, *totals, *_given(layout, uniforms), "unit"])
    made = ", ".join(totals)
    zeros = [f"{total} = tl.zeros([{layout.rows}, {layout.block}], {kind})" for total, kind in totals.items()]
    return f"""
@triton.jit
def {name}_unit({given}, left, MASKED: tl.constexpr):
{indented([*places(layout), *body], 4)}
    return {made}


@triton.jit
def {name}(table, programs, uniforms, steps, flags, partials{"".join(f", {name}" for name in _books(layout))}):
{indented([*_begin(layout, uniforms), *zeros], 4)}
    unit = 0
    for _ in range(whole):
        {made} = {name}_unit({given}, left, False)
        unit += {layout.unit}
    if unit < left:
        {made} = {name}_unit({given}, left - unit, True)
{indented(end, 4)}
"""


assert len(COLUMNS) <= WIDTH
