"""Lines that bring a unit's words from memory and back, for the kernels of `_source`.

A unit is some whole blocks, `Layout.unit` elements: what a program works on at a time. Of every word a kernel has the
address where its tile begins, `NAME_at`; `unit` is how many elements beyond a unit starts, and `left` how many the
tensor has from there on.
"""

from __future__ import annotations

from collections.abc import Iterator

from narrowgauge.kernels._step._layout import AT, BYTES, WORDS, Layout, Moment, Word


def read_words(layout: Layout) -> list[str]:
    """Names of what a step reads of a unit."""
    return ["p", "grad", *(["low"] if layout.low is not None else []), *(name for name, _, _ in _moments(layout))]


def written_words(layout: Layout) -> list[str]:
    """Names of what it writes, without their suffix `_new`."""
    return [name for name in read_words(layout) if name != "grad"]


def pointers(layout: Layout) -> list[str]:
    """Addresses of the tile."""
    made = [_pointer("p", AT["p"], layout.kind, layout), _pointer("grad", AT["grad"], layout.grad, layout)]
    if layout.low is not None:
        made.append(_pointer("low", AT["low"], layout.low, layout))
    columns = layout.columns()
    for name, moment, word in _moments(layout):
        made.append(_pointer(name, columns[moment.name, word.name], word.kind, layout, word))
    return made


def places(layout: Layout) -> list[str]:
    """Places of a unit's elements."""
    return [
        f"rows = tl.arange(0, {layout.rows})[:, None]",
        f"at = rows * {layout.block} + tl.arange(0, {layout.block})[None, :]",
        "here = at < left",
    ]


def loads(layout: Layout) -> list[str]:
    """Every word as it lies in memory; pairs of codes are not unpacked."""
    made = ["p = load(p_at + unit + at, here, MASKED)", "grad = load(grad_at + unit + at, here, MASKED)"]
    if layout.low is not None:
        made.append("low = load(low_at + unit + at, here, MASKED)")
    for name, _, word in _moments(layout):
        at, here = _place(layout, word)
        made.append(f"{name} = load({name}_at + {at}, {here}, MASKED)")
    return made


def stores(layout: Layout) -> list[str]:
    """The way back, of what is called `NAME_new`."""
    per = {name: word for name, _, word in _moments(layout)}
    made = []
    for name in written_words(layout):
        at, here = _place(layout, per[name]) if name in per else ("unit + at", "here")
        made.append(f"store({name}_at + {at}, {name}_new, {here}, MASKED)")
    return made


def word_names(moment: Moment) -> list[str]:
    """What kernels call a moment's words."""
    return [f"{moment.name}_{word.label}" for word in moment.words]


def _moments(layout: Layout) -> Iterator[tuple[str, Moment, Word]]:
    for moment in layout.moments:
        for name, word in zip(word_names(moment), moment.words, strict=True):
            yield name, moment, word


def _pointer(name: str, column: int, kind: str, layout: Layout, word: Word | None = None) -> str:
    per = word.per if word is not None else "element"
    address = f"tl.load(row + {column}).to(tl.pointer_type(tl.{WORDS[kind]}))"
    if layout.aligned and per != "block":
        align = max(1, layout.vector * BYTES[kind] // (2 if per == "pair" else 1))
        address = f"tl.multiple_of({address}, {align})"
    if word is not None and per == "block":
        part, parts = word.part
        return f"{name}_at = {address} + (start // {layout.block} * {parts} + {part})"
    return f"{name}_at = {address} + start" + (" // 2" if per == "pair" else "")


def _place(layout: Layout, word: Word) -> tuple[str, str]:
    """Where a unit's words are from the tile's address on, and which are there."""
    if word.per == "block":
        parts = word.part[1]
        return f"unit // {layout.block} * {parts} + rows * {parts}", f"rows * {layout.block} < left"
    if word.per == "pair":
        half = layout.block // 2
        at = f"rows * {half} + tl.arange(0, {half})[None, :]"
        return f"unit // 2 + {at}", f"2 * ({at}) < left"
    return "unit + at", "here"
