"""What a step kernel works on: tensors, where their addresses are, and lines that bring their words from memory.

One row of the table a tensor, in int64: `COLUMNS` first, then an address a tensor of the moments. Of a parameter
that ranks share, `numel` counts the local elements, `elements` the whole, and `origin` is where its random numbers
begin.

A *unit* is some whole blocks, `Layout.unit` elements: what a program works on at a time. In the lines, `NAME_at`
is a word's address at the program's first unit, which is the tensor's unit number `place`. `unit` counts from
there, and `left` is how many elements the tensor has from `unit` on. Narrow words go together in integers of 32
bits where a unit is whole (see `_packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge.kernels._codec import BYTES, CodebookTable, Codec, Moment, Word

COLUMNS = (
    "p", "grad", "low", "first", "pass_first", "passes", "numel", "seed", "stream", "count", "skipped", "hyper",
    "elements", "origin", "scale",
)  # fmt: skip
WIDTH = 21
AT = {name: number for number, name in enumerate(COLUMNS)}
# Triton's names of what kernels load: narrow floats as their bits.
_LOADED = {"bf16": "int16", "fp16": "int16", "fp32": "float32"}


@dataclass(frozen=True)
class Layout:
    """All that a step kernel's code depends on but the equation."""

    weight: Codec
    kind: str  # what the parameter holds: "bf16", "fp16" or "fp32"; "uint8" where it is codes
    grad: str  # and its gradient
    moments: tuple[Moment, ...]  # in the order of the rule
    block: int  # elements, a power of two of at least 64
    aligned: bool  # whether every address is a multiple of 16 bytes
    negate: bool = False  # whether the gradient counts with its other sign
    gauges: bool = False  # whether sums of what the step does to the weight are worked out too; see `_stats`
    shared: bool = False  # whether ranks share the parameters: random numbers then begin at `origin`, not at 0

    @property
    def blockwise(self) -> bool:
        return any(moment.codec.blockwise for moment in self.moments)

    @property
    def each(self) -> int:
        """Elements a warp. Eight a thread, which bf16 has in 16 bytes, leave codecs and gauges enough registers."""
        return 256 if self.blockwise or self.gauges else 512

    @property
    def rows(self) -> int:
        """Blocks a unit."""
        return max(1, self.each // self.block)

    @property
    def unit(self) -> int:
        """Elements that a program works on at a time."""
        return self.block * self.rows

    @property
    def units(self) -> int:
        """Units a program, 30 at most. Where there is little to compute, many programs are faster."""
        return min(30, max(moment.codec.units for moment in self.moments)) if self.blockwise else 1

    @property
    def pass_units(self) -> int:
        """Units a program of a pass that only reads: it ends with a sum over the program, which takes time."""
        return max(1, 4096 // self.unit)

    @property
    def registers(self) -> int:
        """The most a thread may have: many programs at once, and no spills on the fast path."""
        wide = self.low is not None
        if not self.blockwise:
            return (96 if wide else 64) if self.gauges else 128
        if self.gauges:
            return 128 if wide else 96
        return max(moment.codec.registers for moment in self.moments) + (8 if wide else 0)

    @property
    def low(self) -> str | None:
        """What the low word holds."""
        return self.weight.words[0].kind if self.weight.words else None

    @property
    def vector(self) -> int:
        """Elements that a thread takes in a row: 16 bytes of the widest word."""
        kinds = [self.kind, self.grad, *([self.low] if self.low else [])]
        kinds += [word.kind for moment in self.moments for word in moment.codec.words if not word.per_block]
        return 16 // max(BYTES[kind] for kind in kinds)

    @property
    def warps(self) -> int:
        return max(1, self.unit // self.each)

    @property
    def tables(self) -> tuple[CodebookTable, ...]:
        """Of the moments' codebooks, each once."""
        tables = [moment.codec.table for moment in self.moments]
        return tuple(dict.fromkeys(table for table in tables if table is not None))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.weight, *(moment.codec for moment in self.moments))

    def columns(self) -> dict[tuple[str, str], int]:
        """Columns of the moments' tensors, by the moment's and the tensor's name."""
        words = [(moment.name, word.name) for moment in self.moments for word in moment.codec.words]
        return {word: len(COLUMNS) + number for number, word in enumerate(words)}


@dataclass(frozen=True)
class Kept:
    """Words of one kind of a tensor."""

    name: str  # in the kernel
    column: int  # of their address in the table
    word: Word
    part: int = 0  # which of a block's numbers
    together: int = 1  # how many of them an integer holds

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
