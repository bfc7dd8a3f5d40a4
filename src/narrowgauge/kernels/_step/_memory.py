"""Lines that bring a unit's words from memory and back, for the kernels of `_source`.

A unit is some whole blocks, `Layout.unit` elements: what a program works on at a time. `NAME_at` is a word's
address at the program's first unit, which is the tensor's unit number `place`. `unit` counts from there, and `left`
is how many elements the tensor has from `unit` on.

Narrow words go together in integers of 32 bits where a unit is whole (see `_packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge.kernels._codec import BYTES, Moment, Word
from narrowgauge.kernels._step._layout import AT, Layout

# Triton's names of what kernels load: narrow floats as their bits.
_LOADED = {"bf16": "int16", "fp16": "int16", "fp32": "float32"}


@dataclass(frozen=True)
class Kept:
    """Words of one kind of a tensor.

    Attributes:
        name: in the kernel.
        column: of their address in the table.
        word: what they are.
        part: which of a block's numbers.
        together: how many of them an integer holds; 1 where they go by themselves.
    """

    name: str
    column: int
    word: Word
    part: int = 0
    together: int = 1

    def items(self, layout: Layout, elements: int) -> int:
        """How many items are loaded for a number of elements."""
        if self.word.per_block:
            return elements // layout.block * self.word.per_block
        return elements // self.together // (2 if self.word.packed else 1)

    def places(self, layout: Layout) -> str:
        """Places of a unit's items."""
        if self.word.per_block:
            return f"rows * {self.word.per_block}"
        count = self.items(layout, layout.block)
        return f"rows * {count} + tl.arange(0, {count})[None, :]"

    def here(self, layout: Layout) -> str:
        """Which of them there are."""
        if self.word.per_block:
            return f"rows * {layout.block} < left"
        return f"{2 if self.word.packed else 1} * ({self.places(layout)}) < left"

    def address(self, layout: Layout) -> str:
        kind = "int32" if self.together > 1 else _LOADED.get(self.word.kind, self.word.kind)
        address = f"tl.load(row + {self.column}).to(tl.pointer_type(tl.{kind}))"
        if layout.aligned and not self.word.per_block:
            align = max(1, layout.vector * BYTES[self.word.kind] // (2 if self.word.packed else 1))
            address = f"tl.multiple_of({address}, {align})"
        return f"{address} + (place * {self.items(layout, layout.unit)} + {self.part})"


def kept_words(layout: Layout, packed: bool) -> list[Kept]:
    """What a step reads of a tensor, in order; packed as far as that goes, or not at all."""
    found = [Kept("p", AT["p"], Word("p", layout.kind)), Kept("grad", AT["grad"], Word("grad", layout.grad))]
    found += [Kept("low", AT["low"], word) for word in layout.weight.words]
    columns = layout.columns()
    for moment in layout.moments:
        found += [
            Kept(name, columns[moment.name, word.name], word, part) for name, word, part in named_words(moment)
        ]
    if not (packed and layout.aligned):
        return found
    # 16-bit words go together only where a weight has two words.
    pairs = ("p", "low") if layout.weight.pairs else ()
    return [
        replace(kept, together=4 // BYTES[kept.word.kind] if kept.name in pairs else 4 if kept.word.coded else 1)
        for kept in found
    ]


def named_words(moment: Moment) -> list[tuple[str, Word, int]]:
    """What kernels call a moment's words, what they are, and which of a block's numbers."""
    parts = [(word, part) for word in moment.codec.words for part in range(max(1, word.per_block))]
    return [(f"{moment.name}_{w.name}{part if w.per_block > 1 else ''}", w, part) for w, part in parts]


def pointers(layout: Layout, words: Sequence[Kept]) -> list[str]:
    """Addresses of the program's first unit."""
    return [f"{kept.name}_at = {kept.address(layout)}" for kept in words]


def loads(layout: Layout, words: Sequence[Kept]) -> list[str]:
    """Words as they are in memory, called by their names."""
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
