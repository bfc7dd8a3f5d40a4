"""Lines that bring a unit's words from memory and back, for the kernels of `_source`.

A unit is some whole blocks, `Layout.unit` elements: what a program works on at a time. Of every word a kernel has
the address where the program's unit number `place` begins, `NAME_at`; `unit` is a unit's number from there on,
`left` how many elements the tensor has from it on.

Narrow words are `packed` in integers of 32 bits where a unit is whole (see `_packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge.kernels._step._layout import AT, BYTES, WORDS, Layout, Moment

_TOGETHER = ("split8", "expansion", "kahan")


@dataclass(frozen=True)
class Kept:
    """Words of one kind of a tensor.

    Attributes:
        name: in the kernel.
        column: of their address in the table.
        kind: what they hold.
        per, part: as of `Word`.
        packed: how many of them an integer holds; 1 where they go by themselves.
    """

    name: str
    column: int
    kind: str
    per: str = "element"
    part: tuple[int, int] = (0, 1)
    packed: int = 1

    def items(self, layout: Layout, elements: int) -> int:
        """What is loaded for so many elements, one after the other."""
        if self.per == "block":
            return elements // layout.block * self.part[1]
        return elements // self.packed // (2 if self.per == "pair" else 1)

    def places(self, layout: Layout) -> str:
        """Places of a unit's items."""
        if self.per == "block":
            return f"rows * {self.part[1]}"
        count = self.items(layout, layout.block)
        return f"rows * {count} + tl.arange(0, {count})[None, :]"

    def here(self, layout: Layout) -> str:
        """Which of them there are."""
        if self.per == "block":
            return f"rows * {layout.block} < left"
        return f"{2 if self.per == 'pair' else 1} * ({self.places(layout)}) < left"

    def address(self, layout: Layout) -> str:
        kind = "int32" if self.packed > 1 else WORDS[self.kind]
        address = f"tl.load(row + {self.column}).to(tl.pointer_type(tl.{kind}))"
        if layout.aligned and self.per != "block":
            align = max(1, layout.vector * BYTES[self.kind] // (2 if self.per == "pair" else 1))
            address = f"tl.multiple_of({address}, {align})"
        return f"{address} + (place * {self.items(layout, layout.unit)} + {self.part[0]})"


def kept_words(layout: Layout, packed: bool) -> list[Kept]:
    """What a step reads of a tensor, in order; packed as far as that goes, or not at all."""
    found = [Kept("p", AT["p"], layout.kind), Kept("grad", AT["grad"], layout.grad)]
    if layout.low is not None:
        found.append(Kept("low", AT["low"], layout.low))
    columns = layout.columns()
    for moment in layout.moments:
        for name, word in zip(word_names(moment), moment.words, strict=True):
            found.append(Kept(name, columns[moment.name, word.name], word.kind, word.per, word.part))
    if not (packed and layout.aligned):
        return found
    return [replace(kept, packed=_packing(layout, kept)) for kept in found]


def _packing(layout: Layout, kept: Kept) -> int:
    """How many words go together. Halves are no trouble by themselves: they do where a weight has two words."""
    if kept.per != "block" and BYTES[kept.kind] == 1:
        return 4
    return 2 if kept.name in ("p", "low") and kept.kind == "bf16" and layout.weight in _TOGETHER else 1


def word_names(moment: Moment) -> list[str]:
    """What kernels call a moment's words."""
    return [f"{moment.name}_{word.label}" for word in moment.words]


def pointers(layout: Layout, words: Sequence[Kept]) -> list[str]:
    """Addresses of the program's first unit."""
    return [f"{kept.name}_at = {kept.address(layout)}" for kept in words]


def loads(layout: Layout, words: Sequence[Kept]) -> list[str]:
    """Words as they lie in memory, called by their names."""
    return [f"{kept.name} = load({_where(layout, kept)}, MASKED)" for kept in words]


def stores(layout: Layout, words: Sequence[Kept]) -> list[str]:
    """The way back, of what is called `NAME_new`."""
    return [f"store({_where(layout, kept, f'{kept.name}_new, ')}, MASKED)" for kept in words if kept.name != "grad"]


def _where(layout: Layout, kept: Kept, value: str = "") -> str:
    at = f"{kept.name}_at + unit * {kept.items(layout, layout.unit)} + {kept.places(layout)}"
    return f"{at}, {value}{kept.here(layout)}"


def rows(layout: Layout) -> str:
    """The blocks of a unit."""
    return f"rows = tl.arange(0, {layout.rows})[:, None]"


def elements(layout: Layout) -> str:
    """Which elements of a unit are there."""
    return f"here = rows * {layout.block} + tl.arange(0, {layout.block})[None, :] < left"
