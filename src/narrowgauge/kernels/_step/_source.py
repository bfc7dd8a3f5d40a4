"""The text of a step's kernels: `step`, and before it `finite` and `sums` where they are needed.

A program works on some units of a tensor, one after the other. `_layout` has the lines that bring words from memory
and back, `_codecs` those that decode and encode them, `_expressions` the equation's, `_stats` the gauges'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowgauge.kernels._codec import in_order
from narrowgauge.kernels._graph import Equation, Node
from narrowgauge.kernels._step._codecs import SlowPathTests, decode, encode, has, peak, write
from narrowgauge.kernels._step._expressions import indented, lines
from narrowgauge.kernels._step._layout import (
    AT,
    WIDTH,
    Kept,
    Layout,
    elements,
    kept_words,
    loads,
    pointers,
    rows,
    stores,
)
from narrowgauge.kernels._step._stats import Stats


def effects_used(layout: Layout, equation: Equation) -> dict[str, Node]:
    """What a unit of each moment will still add to the weight, for those whose error is fed back."""
    feeding = [moment.name for moment in layout.moments if moment.codec.error_feedback]
    return {name: equation.effects[name] for name in feeding if name in equation.effects}


def step_source(layout: Layout, equation: Equation, met: Sequence[Node]) -> str:
    """The kernel `step` of an equation.

    `met` are the numbers that a tensor's row of numbers holds, in order. Behind them are, of a weight that has a
    scale, the scale and the inverse of that of its new words.
    """
    known = _inputs(layout) | {node: f"u{i}" for i, node in enumerate(met)}
    effects, ratio = effects_used(layout, equation), equation.ratio if layout.gauges else None
    stats = Stats(layout, ratio is not None, has(layout.weight, "X_moved"))
    roots = [equation.delta, *equation.moments.values(), *effects.values()]
    factors = list(ratio.args) if ratio is not None else []
    update, names = lines(roots, known, "x")
    update.append(f"delta = {names[equation.delta]}")
    measured, names_too = lines(factors, names, "y")
    scales = [f"scale, inverse = u{len(met)}, u{len(met) + 1}"] if layout.weight.scaled else []

    def unit(tests: SlowPathTests | None) -> list[str]:
        body = [*scales, *decode(layout, tests), *update]
        for moment in in_order(layout.moments):
            body += encode(layout, moment, names[equation.moments[moment.name]], moment.name in effects, tests)
        body += [f"delta = tl.fma({names[effect]}, {name}_lost, delta)" for name, effect in effects.items()]
        body += write(layout, tests)
        body += [*measured, *stats.unit(tests is not None, tuple(names_too[factor] for factor in factors))]
        return body + peak(layout, tests)

    tests = SlowPathTests()
    fast = unit(tests)
    return _step_kernels(layout, len(met) + 2 * len(scales), fast, tests.test(), unit(None), stats)


def sums_source(layout: Layout, terms: Mapping[str, Node], met: Sequence[Node]) -> str:
    """The kernel `sums`: a program's sums of terms: eight neighbors in their own precision, then float64."""
    known = _inputs(layout) | {node: f"u{i}" for i, node in enumerate(met)}
    made, names = lines(terms.values(), known, "x")
    sums = [f"sum{number}" for number in range(len(terms))]
    body = list(made)
    for total, node in zip(sums, terms.values(), strict=True):
        body += [f"term = {names[node]}", "if MASKED:", "    term = tl.where(here, term, 0.0)"]
        body.append(f"{total} += tl.sum(term.reshape([{layout.rows}, {layout.block // 8}, 8]), 2).to(tl.float64)")
    end = [
        f"tl.store(partials + {len(terms)} * program + {number}, tl.sum(tl.sum({total}, 1), 0))"
        for number, total in enumerate(sums)
    ]
    zeros = f"tl.zeros([{layout.rows}, {layout.block // 8}], tl.float64)"
    bodies = [
        [*loads(layout, kept_words(layout, packed)), *decode(layout, None), *body] for packed in (True, False)
    ]
    return _pass_kernel("sums", layout, len(met), dict.fromkeys(sums, zeros), bodies, end)


def finite_source(layout: Layout) -> str:
    """The kernel `finite`: flags tensors whose gradient has an infinity or NaN."""
    end = ["if largest(peak) >= INFINITY:", "    tl.store(flags + tensor, 1)"]
    return _gradient_pass("finite", layout, {}, [], end)


def look_source(layout: Layout, squares: bool) -> str:
    """The kernel `look`: flags tensors whose gradient has an infinity or NaN once it is multiplied.

    In the place of `uniforms` it is given the number that it is multiplied by, 1 or the inverse of a loss scale.
    With `squares` it leaves each program's sum of squares, of the gradient as it is in memory; in float64, so
    that no gradient is too large or too small to count, and every product is exact.
    """
    end = [
        "largest_one = float_of(largest(peak)) * tl.load(uniforms)",
        "if (bits_of(largest_one) & 0x7FFFFFFF) >= INFINITY:",
        "    tl.store(flags + tensor, 1)",
    ]
    if not squares:
        return _gradient_pass("look", layout, {}, [], end)
    zeros = f"tl.zeros([{layout.rows}, {layout.block}], tl.float64)"
    add = ["wide_one = one.to(tl.float64)", "squares = tl.fma(wide_one, wide_one, squares)"]
    end.append("tl.store(partials + program, tl.sum(tl.sum(squares, 1), 0))")
    return _gradient_pass("look", layout, {"squares": zeros}, add, end)


def _gradient_pass(name: str, layout: Layout, totals: Mapping[str, str], add: list[str], end: list[str]) -> str:
    """A kernel that reads gradients, one element `one`, and has the largest magnitude's bits in `peak`."""
    body = [
        *loads(layout, [kept for kept in kept_words(layout, False) if kept.name == "grad"]),
        f"one = widen(grad, {layout.grad!r})",
        "peak = tl.maximum(peak, bits_of(one) & 0x7FFFFFFF)",
        *add,
    ]
    zeros = f"tl.zeros([{layout.rows}, {layout.block}], tl.int32)"
    return _pass_kernel(name, layout, 0, {"peak": zeros, **totals}, [body, body], end)


def _inputs(layout: Layout) -> dict[Node, str]:
    names = ("weight", "grad", *(moment.name for moment in layout.moments))
    return {Node("input", (name,)): f"{name}_in" for name in names}


def _begin(layout: Layout, uniforms: int, first: str, units: int) -> list[str]:
    """Which tensor a program works on, which units of it, and the tensor's numbers.

    `first` is the column with the number of the tensor's first program, `units` how many units a program has.
    """
    return [
        "program = tl.program_id(0)",
        "tensor = tl.load(programs + program)",
        f"row = table + tensor * {WIDTH}",
        f"place = (program - tl.load(row + {AT[first]})) * {units}",
        f"start = place * {layout.unit}",
        f"left = tl.minimum(tl.load(row + {AT['numel']}) - start, {units * layout.unit}).to(tl.int32)",
        f"whole = left // {layout.unit}",
        *(f"u{i} = tl.load(uniforms + {uniforms} * tensor + {i})" for i in range(uniforms)),
    ]


def _given(layout: Layout, uniforms: int) -> list[str]:
    return [*_tables(layout), *(f"u{i}" for i in range(uniforms))]


def _tables(layout: Layout) -> list[str]:
    return [f"{kind}{i}" for i in range(len(layout.tables)) for kind in ("values", "cells")]


def _step_kernels(
    layout: Layout, uniforms: int, fast: list[str], unusual: str, exact: list[str], stats: Stats
) -> str:
    """The kernel `step`: one unit after the other, each loaded while the one before it is worked on.

    Loaded words wait in registers as they were in memory. A unit that is unusual, or not whole, is not written
    but noted; in the end `exact_unit` does it again.
    """
    packed, single = (kept_words(layout, yes) for yes in (True, False))
    read, written = [kept.name for kept in single], [kept.name for kept in single if kept.name != "grad"]
    at, words = ", ".join(f"{name}_at" for name in read), ", ".join(read)
    made, after = ", ".join(f"{name}_new" for name in written), ", ".join(f"{name}_after" for name in read)
    peaks = ["peak"] if layout.weight.scaled else []
    found, sums = ", ".join([made, *peaks, *stats.names]), "gauges" if layout.gauges else "partials"
    begin, add, end = (
        "".join(f"\n{' ' * by}{line}" for line in some)
        for by, some in (
            (
                8,
                [
                    *stats.begin(),
                    *(f"all_peak = tl.zeros([{layout.rows}, {layout.block // 8}], tl.int32)" for _ in peaks),
                ],
            ),
            (20, [*stats.add(), *("all_peak = tl.maximum(all_peak, peak)" for _ in peaks)]),
            (8, [*stats.end(), *(_keep_largest() if peaks else [])]),
        )
    )
    add_again = add.replace("\n    ", "\n")
    given = ", ".join(["number", "seed", "stream", *_given(layout, uniforms)])
    ahead = [f"{after} = fast_load({at}, tl.minimum(turn + 1, whole - 1), {layout.unit}, False)"]
    on = [f"{words} = {after}"]
    if layout.units == 1:
        ahead = on = []
    return f"""
{_traffic("fast", layout, packed, at, words, made)}
{_traffic("exact", layout, single, at, words, made)}

@triton.jit
def fast_unit({words}, start, {given}):
{indented(fast, 4)}
    return {found}, {unusual}


@triton.jit
def exact_unit({words}, start, left, {given}):
{indented([rows(layout), elements(layout), *exact], 4)}
    return {found}


@triton.jit
def step(table, programs, uniforms, steps, flags, {", ".join([sums, *_tables(layout)])}):
{indented(_begin(layout, uniforms, "first", layout.units), 4)}
    number = tl.load(steps + tensor)
    if number > 0:
        seed, stream = tl.load(row + {AT["seed"]}).to(tl.uint32), tl.load(row + {AT["stream"]}).to(tl.uint32)
        origin = {f"tl.load(row + {AT['origin']}) + start" if layout.shared else "start"}
        again = tl.where(whole * {layout.unit} < left, 1 << whole, 0){begin}
        if whole > 0:
{indented(pointers(layout, packed), 12)}
            {words} = fast_load({at}, 0, {layout.unit}, False)
            for turn in range(whole):
{indented(ahead, 16)}
                {found}, unusual = fast_unit({words}, origin + turn * {layout.unit}, {given})
                if unusual:
                    again = again | (1 << turn)
                else:
                    fast_store({at}, {made}, turn, {layout.unit}, False){add}
{indented(on, 16)}
        turn = 0
        while again != 0:
            if (again & 1) != 0:
                rest = left - turn * {layout.unit}
{indented(pointers(layout, single), 16)}
                {words} = exact_load({at}, turn, rest, True)
                {found} = exact_unit({words}, origin + turn * {layout.unit}, rest, {given})
                exact_store({at}, {made}, turn, rest, True){add_again}
            again = again >> 1
            turn += 1{end}
"""


def _keep_largest() -> list[str]:
    """The program's largest code, beside the tensor's scale."""
    return [
        f"largest_at = (tl.load(row + {AT['scale']}) + 4).to(tl.pointer_type(tl.int32))",
        'tl.atomic_max(largest_at, bits_of((largest(all_peak) >> 24).to(tl.float32)), sem="relaxed")',
    ]


def _traffic(name: str, layout: Layout, words: Sequence[Kept], at: str, read: str, made: str) -> str:
    """Functions that load a unit's words and store them."""
    return f"""
@triton.jit
def {name}_load({at}, unit, left, MASKED: tl.constexpr):
{indented([rows(layout), *loads(layout, words)], 4)}
    return {read}


@triton.jit
def {name}_store({at}, {made}, unit, left, MASKED: tl.constexpr):
{indented([rows(layout), *stores(layout, words)], 4)}
"""


def _pass_kernel(
    name: str, layout: Layout, uniforms: int, totals: Mapping[str, str], bodies: Sequence[list[str]], end: list[str]
) -> str:
    """A kernel that reads every unit once: `totals` begin, a body goes on with them, `end` keeps them.

    There are two bodies: for a whole unit, whose words come packed, and for one that is not whole.
    """
    both = [kept_words(layout, packed) for packed in (True, False)]
    at = [f"{kept.name}_at" for kept in both[0]]
    given, made = ", ".join([*at, *totals, *_given(layout, uniforms), "unit"]), ", ".join(totals)
    begin = _begin(layout, uniforms, "pass_first", layout.pass_units)
    units = "".join(
        f"""
@triton.jit
def {kind}_unit({given}, left, MASKED: tl.constexpr):
{indented([rows(layout), elements(layout), *body], 4)}
    return {made}

"""
        for kind, body in zip(("fast", "exact"), bodies, strict=True)
    )
    return f"""{units}
@triton.jit
def {name}(table, programs, uniforms, steps, flags, partials{"".join(f", {name}" for name in _tables(layout))}):
{indented([*begin, *(f"{total} = {value}" for total, value in totals.items())], 4)}
    unit = 0
    if whole > 0:
{indented(pointers(layout, both[0]), 8)}
        for _ in range(whole):
            {made} = fast_unit({given}, {layout.unit}, False)
            unit += 1
    if whole * {layout.unit} < left:
{indented(pointers(layout, both[1]), 8)}
        {made} = exact_unit({given}, left - whole * {layout.unit}, True)
{indented(end, 4)}
"""
