"""The text of a step's kernels.

`step_source` is one tile of the fused step, `sums_source` the partial sums that some rules need first: the same
reading of words, and terms in place of the update. `numbers_source` is the small kernel of the scalars. What they
have in common is in `_common`: finding the tensor, and what is read of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowgauge.kernels._graph import Node
from narrowgauge.kernels._step._emit import lines
from narrowgauge.kernels._step._layout import AT, BYTES, COLUMNS, WIDTH, WORDS, Layout, Moment, Word

_PAGE = 1024  # partial sums that the scalars' kernel adds up at a time


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
    body = [f"delta = {names[delta]}"]
    first_units = sorted(layout.moments, key=lambda moment: moment.beside is not None)
    for moment in first_units:
        body += _encode(layout, moment, names[moments[moment.name]])
    body += [f"delta = delta + ({names[reach[moment.name]]}) * {moment.name}_lost" for moment in handing]
    body += _write(layout)
    return _kernel("step", layout, len(met), [*_read(layout), *update, *body])


def sums_source(layout: Layout, terms: Mapping[str, Node], met: Sequence[Node]) -> str:
    """The kernel `sums`: each program's sums of the terms, in float64."""
    known = _inputs(layout) | {node: f"u{i}" for i, node in enumerate(met)}
    made, names = lines(terms.values(), known, "x")
    for number, node in enumerate(terms.values()):
        made += [
            f"term = ({names[node]}).to(tl.float64)",
            "if MASKED:",
            "    term = tl.where(here, term, 0.0)",
            f"tl.store(partials + {len(terms)} * program + {number}, tl.sum(tl.sum(term, 1), 0))",
        ]
    return _kernel("sums", layout, len(met), [*_read(layout), *made])


def finite_source(layout: Layout) -> str:
    """The kernel `finite`: flags tensors whose gradient has an infinity or NaN."""
    body = [
        *_pointer("grad", AT["grad"], layout.grad, layout, "start"),
        f"grad = widen(load(grad_at + at, here, MASKED), {layout.grad!r})",
        "if largest(bits_of(grad) & 0x7FFFFFFF) >= INFINITY:",
        "    tl.store(flags + tensor, 1)",
    ]
    return _kernel("finite", layout, 0, body)


def numbers_source(
    scalars: Mapping[str, Node], hyper: Sequence[str], terms: Sequence[str], met: Sequence[Node]
) -> str:
    """The kernel `numbers`: counts a step, and works out the numbers that elements meet.

    Args:
        scalars: the rule's, as graphs of hyperparameters and the step.
        hyper: names of the hyperparameters, in the order of their row.
        terms: names of the sums.
        met: what to work out.
    """
    known = {Node("number", (name,), True): f"h{i}" for i, name in enumerate(hyper)}
    known[Node("number", ("step",), True)] = "step"
    first, names = lines(scalars.values(), known, "s", double=True)
    inner = {Node("number", (name,), True): names[node] for name, node in scalars.items()}
    inner |= {Node("number", (name,), True): f"sum{i}" for i, name in enumerate(terms)}
    inner[Node("number", ("elements",), True)] = "elements"
    second, names = lines(met, inner, "t", double=True)
    read = [f"h{i} = tl.load(hyper + tl.load(row + {AT['hyper']}) * {len(hyper)} + {i})" for i in range(len(hyper))]
    written = [
        f"tl.store(uniforms + {len(met)} * tensor + {i}, ({names[node]}).to(tl.float32))"
        for i, node in enumerate(met)
    ]
    return f"""
@triton.jit
def numbers(
    table, hyper, uniforms, steps, flags, partials, TILE: tl.constexpr, ADVANCE: tl.constexpr, SKIP: tl.constexpr
):
    tensor = tl.program_id(0)
    row = table + tensor * {WIDTH}
    counter = tl.load(row + {AT["count"]}).to(tl.pointer_type(tl.float32))
    count = tl.load(counter)
    if ADVANCE:
        taken = tl.full([], 1, tl.int32)
        if SKIP:
            taken = 1 - tl.load(flags + tensor)
            tl.store(flags + tensor, 0)
            refused = tl.load(row + {AT["skipped"]}).to(tl.pointer_type(tl.int64))
            tl.store(refused, tl.load(refused) + (1 - taken).to(tl.int64))
        tl.store(counter, count + taken.to(tl.float32))
        count = count + 1.0
        tl.store(steps + tensor, count.to(tl.int32) * taken)
    step = count.to(tl.float64)
    numel = tl.load(row + {AT["numel"]})
    elements = numel.to(tl.float64)
{_indented([*_added_up(terms), *read, *first, *second, *written], 4)}
"""


def _added_up(terms: Sequence[str]) -> list[str]:
    """Partial sums of a tensor's programs, always in the same order."""
    if not terms:
        return []
    made = [
        f"first = tl.load(row + {AT['first']})",
        "count = (numel + TILE - 1) // TILE",
        f"place = tl.arange(0, {_PAGE})",
        *(f"total{i} = tl.zeros([{_PAGE}], tl.float64)" for i in range(len(terms))),
        "done = count * 0",
        "while done < count:",
    ]
    for i in range(len(terms)):
        at = f"partials + (first + done + place) * {len(terms)} + {i}"
        made.append(f"    total{i} += tl.load({at}, mask=done + place < count, other=0.0)")
    return [*made, f"    done += {_PAGE}", *(f"sum{i} = tl.sum(total{i}, 0)" for i in range(len(terms)))]


def _inputs(layout: Layout) -> dict[Node, str]:
    names = ("weight", "grad", *(moment.name for moment in layout.moments))
    return {Node("input", (name,)): f"{name}_in" for name in names}


def _kernel(name: str, layout: Layout, uniforms: int, body: Sequence[str]) -> str:
    """A kernel whose programs each do `body` on one tile."""
    tables = "".join(f", values{i}, cells{i}" for i in range(len(layout.cells)))
    us = "".join(f", u{i}" for i in range(uniforms))
    loads = [f"u{i} = tl.load(uniforms + {uniforms} * tensor + {i})" for i in range(uniforms)]
    given = f"row, tensor, program, start, left, number, flags, partials{tables}{us}"
    return f"""
@triton.jit
def {name}_tile({given}, MASKED: tl.constexpr):
    rows = tl.arange(0, {layout.rows})[:, None]
    at = rows * {layout.block} + tl.arange(0, {layout.block})[None, :]
    here = at < left
{_indented(body, 4)}


@triton.jit
def {name}(table, programs, uniforms, steps, flags, partials{tables}, TAIL: tl.constexpr, COUNTED: tl.constexpr):
    program = tl.program_id(0)
    tensor = tl.load(programs + program)
    number = tl.load(steps + tensor) if COUNTED else 1
    row = table + tensor * {WIDTH}
    start = (program - tl.load(row + {AT["first"]})) * {layout.tile}
    left = tl.load(row + {AT["numel"]}) - start
{_indented(loads, 4)}
    if number > 0:
        if left >= {layout.tile}:
            {name}_tile({given}, False)
        elif TAIL:
            {name}_tile({given}, True)
"""


def _pointer(name: str, column: int, kind: str, layout: Layout, offset: str, per: str = "element") -> list[str]:
    """A word's address in this tile."""
    word = f"tl.load(row + {column}).to(tl.pointer_type(tl.{WORDS[kind]}))"
    if layout.aligned and per != "block":
        align = max(1, layout.vector * BYTES[kind] // (2 if per == "pair" else 1))
        word = f"tl.multiple_of({word}, {align})"
    return [f"{name}_at = {word} + {offset}"]


def _offset(layout: Layout, word: Word) -> tuple[str, str, str]:
    """Where a tile begins among words, the words' places in it, and which are there."""
    if word.per == "block":
        part, parts = word.part
        return f"start // {layout.block} * {parts} + {part}", f"rows * {parts}", f"rows * {layout.block} < left"
    if word.per == "pair":
        half = layout.block // 2
        at = f"rows * {half} + tl.arange(0, {half})[None, :]"
        return "start // 2", at, f"2 * ({at}) < left"
    return "start", "at", "here"


def _read(layout: Layout) -> list[str]:
    """Weight, gradient and moments in float32."""
    made = _pointer("p", AT["p"], layout.kind, layout, "start")
    made += ["p = load(p_at + at, here, MASKED)", *_pointer("grad", AT["grad"], layout.grad, layout, "start")]
    made += ["grad_word = load(grad_at + at, here, MASKED)", "low = p"]
    if layout.low is not None:
        made += _pointer("low", AT["low"], layout.low, layout, "start")
        made += ["low = load(low_at + at, here, MASKED)"]
    columns = layout.columns()
    for moment in layout.moments:
        for word in moment.words:
            offset, at, here = _offset(layout, word)
            name = f"{moment.name}_{word.label}"
            made += _pointer(name, columns[moment.name, word.name], word.kind, layout, offset, word.per)
            made.append(f"{name} = load({name}_at + {at}, {here}, MASKED)")
    made += [f"weight_in = read_weight(p, low, {layout.weight!r}, {layout.kind!r})"]
    made += [f"grad_in = {'-' if layout.negate else ''}widen(grad_word, {layout.grad!r})"]
    for moment in sorted(layout.moments, key=lambda moment: moment.beside is not None):
        made.append(f"{moment.name}_in = {_decode(layout, moment)}")
    return made


def _decode(layout: Layout, moment: Moment) -> str:
    name, storage = moment.name, moment.storage
    beside = "None" if moment.beside is None else f"{moment.beside}_in"
    codes = f"{name}_codes"
    if any(word.per == "pair" for word in moment.words):
        codes = f"unpack({codes}, {layout.rows}, {layout.block})"
    if storage == "expansion":
        return f"widen({name}_hi, 'bf16') + widen({name}_lo, 'bf16')"
    if storage.startswith("pattern"):
        return f"{storage}_decode({codes}, {_ranges(moment)})"
    if storage.startswith("relative"):
        return f"relative_decode({codes}, {name}_scales, {beside}, {storage[-1]})"
    if storage == "signed8":
        return f"signed_decode({codes}, {name}_ranges0, {name}_ranges1)"
    if storage in ("8bit", "4bit"):
        return f"table_decode({codes}, {name}_scales, values{moment.table})"
    if storage == "fp8":
        return f"e4m3_decode({codes}, {name}_scales)"
    return f"widen({name}_, {storage!r})"


def _ranges(moment: Moment) -> str:
    """What a block of patterns keeps beside its codes, in the kernel's names."""
    return ", ".join(f"{moment.name}_{word.label}" for word in moment.words if word.name == "ranges")


def _encode(layout: Layout, moment: Moment, value: str) -> list[str]:
    """A new moment's words, and their way to memory."""
    name, storage = moment.name, moment.storage
    made = [f"{name}_new = {value}"]
    if any(word.per == "block" for word in moment.words):
        made += ["if MASKED:", f"    {name}_new = tl.where(here, {name}_new, 0.0)"]
    if storage == "expansion":
        made += [
            f"{name}_hi = narrow({name}_new, 'bf16')",
            f"{name}_lo = {name}_new - widen({name}_hi, 'bf16')",
            f"{name}_lo = tl.where(({name}_hi.to(tl.int32) & 0x7F80) == 0x7F80, 0.0, {name}_lo)",
            f"{name}_lo = narrow({name}_lo, 'bf16')",
        ]
    elif storage.startswith("pattern"):
        made += [
            f"{name}_bits = random_halves(start, number, tl.load(row + {AT['seed']}), "
            f"tl.load(row + {AT['stream']}), {moment.purpose}, {layout.rows}, {layout.block})",
            f"{name}_codes, {_ranges(moment)}, {name}_kept = {storage}_encode({name}_new, {name}_bits)",
        ]
    elif storage.startswith("relative"):
        beside = "None" if moment.beside is None else f"{moment.beside}_kept"
        made += [f"{name}_codes, {name}_scales, {name}_lost = relative_encode({name}_new, {beside}, {storage[-1]})"]
    elif storage == "signed8":
        words = f"{name}_codes, {name}_ranges0, {name}_ranges1"
        made += [f"{words}, {name}_lost = signed_encode({name}_new)"]
    elif storage in ("8bit", "4bit"):
        assert moment.table is not None
        at, mirror = layout.cells[moment.table]
        made += [
            f"{name}_codes, {name}_scales = table_encode("
            f"{name}_new, cells{moment.table}, {at}, {moment.signed}, {mirror})"
        ]
    elif storage == "fp8":
        made += [f"{name}_codes, {name}_scales = e4m3_encode({name}_new, {moment.signed})"]
    else:
        made += [f"{name}_ = narrow({name}_new, {storage!r})"]
    for word in moment.words:
        _, place, here = _offset(layout, word)
        kept = f"{name}_{word.label}"
        if word.per == "pair":
            made += ["if MASKED:", f"    {kept} = tl.where(here, {kept}, 0).to(tl.uint8)"]
            made += [f"{kept} = pack({kept}, {layout.rows}, {layout.block})"]
        made.append(f"store({kept}_at + {place}, {kept}, {here}, MASKED)")
    return made


def _write(layout: Layout) -> list[str]:
    """The weight's words."""
    random = "None"
    made = []
    if layout.weight == "stochastic":
        random = "random"
        made.append(
            f"random = random_words(start, number, tl.load(row + {AT['seed']}), tl.load(row + {AT['stream']}), "
            f"{layout.rows}, {layout.block})"
        )
    made += [
        f"p, low = write_weight(p, low, weight_in, delta, {random}, {layout.weight!r}, {layout.kind!r})",
        "store(p_at + at, p, here, MASKED)",
    ]
    return [*made, "store(low_at + at, low, here, MASKED)"] if layout.low is not None else made


def _indented(text: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in text)


assert len(COLUMNS) <= WIDTH
