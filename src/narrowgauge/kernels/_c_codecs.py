"""How moments are kept, as C functions: which words each takes in memory, and how it is called.

The functions are in `c/`. Numbers of a block are written when all of it is known: what has such is encoded a block
at a time, all else, and all that is decoded, a part at a time. Lengths of both are constants of the compilation. A
codec here is a value that says what their arguments are; that is all an emitter, or a test, needs to call them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.formats import Coder

_SOURCES = Path(__file__).parent / "c"
_ONE = 0x3F80  # the upper half of the pattern of 1


@dataclass(frozen=True)
class Word:
    """A tensor that a block has a part of.

    Attributes:
        name: its key among the moment's words.
        c_type: what its elements are in C.
        bits: of an element of the block; 0 for a tensor that has `count` numbers a block.
        count: see `bits`.
    """

    name: str
    c_type: str
    bits: int
    count: int = 1

    def part_of(self, block: str) -> str:
        """The address in C of the part of a block that begins at element o, from the block's address."""
        return f"(void *)({block} + o * {self.bits} / 8)" if self.bits else f"(void *)({block})"

    def nbytes(self, elements: int) -> int:
        """Bytes that a block of so many elements takes of it."""
        return (elements * self.bits + 7) // 8 if self.bits else 4 * self.count


@dataclass(frozen=True)
class Table:
    """A codebook made ready for look-ups; see `c/table.h`.

    Attributes:
        values: float32, what 256 codes mean.
        cells: uint32, a code and what carries into it beyond the boundary.
        entries: uint32, the cells without the patterns that they begin with: a pattern added, its code is above.
        zero: the code of zero.
        first: the upper half of the pattern that the first cell stands for.
    """

    values: NDArray[np.float32]
    cells: NDArray[np.uint32]
    entries: NDArray[np.uint32]
    zero: int
    first: int

    @classmethod
    def of(cls, coder: Coder) -> Table:
        """The table of a coder.

        Raises:
            ValueError: if two boundaries fall into one cell, or one lies so near to 1 that rounding passes it.
        """
        values, boundaries = coder.values.cpu().numpy(), coder.boundaries.cpu().numpy()
        positive = boundaries[boundaries > 0]
        patterns = positive.view(np.uint32)
        upper = patterns >> 16
        if len(np.unique(upper)) < len(upper):
            raise ValueError("a cell of the table would hold two boundaries")
        if positive[-1] > 1 - 2.0**-20:
            raise ValueError(f"the outermost boundary would be {positive[-1]}, takes at most 1 - 2^-20")
        first, last = int(upper[0]) - 1, _ONE
        carry = np.zeros(last - first + 1, dtype=np.uint32)
        carry[upper - first] = 0xFFFF - (patterns & 0xFFFF)
        below = np.searchsorted(upper, np.arange(first, last + 1), side="left").astype(np.uint32)
        padded = np.pad(values, (0, 256 - len(values)))
        cells = (below << 16 | carry).astype(np.uint32)
        entries = cells - (np.arange(first, last + 1, dtype=np.uint32) << 16)
        return cls(padded, cells, entries, len(boundaries) - len(positive), first)


@dataclass(frozen=True, eq=False)
class Codec:
    """A way to keep a moment.

    Attributes:
        name: of the functions, before ``_decode`` and ``_encode``.
        words: its tensors.
        sources: files of `c/` that they are in.
        constants: further arguments in C.
        table: whose two arrays are arguments before the constants; see `Table`.
        relative: whether the second moment beside it is an argument.
        random: whether `encode` takes 16 random bits an element.
    """

    name: str
    words: tuple[Word, ...]
    sources: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    table: Table | None = None
    relative: bool = False
    random: bool = False

    @property
    def blockwise(self) -> bool:
        """Whether it has numbers of a block, and is encoded a block at a time."""
        return any(not word.bits for word in self.words)


def source(name: str) -> str:
    """A file of `c/`."""
    return (_SOURCES / name).read_text(encoding="utf-8")


FLOAT32 = Codec("float32", (Word("", "float", 32),))
BFLOAT16 = Codec("bfloat16", (Word("", "u16", 16),))
EXPANSION = Codec("expansion", (Word("hi", "u16", 16), Word("lo", "u16", 16)))


def _coded(name: str, bits: int, numbers: Word, *sources: str, **more: Any) -> Codec:
    return Codec(name, (Word("codes", "u8", bits), numbers), ("pairs.h", *sources), **more)


_SCALES = Word("scales", "float", 0)
_RANGES = {8: Word("ranges", "i32", 0), 4: Word("ranges", "i32", 0, count=2)}
PATTERNS = {
    bits: _coded(f"pattern{bits}", bits, ranges, "random.h", "patterns.h", random=True)
    for bits, ranges in _RANGES.items()
}
RELATIVE = {bits: _coded(f"relative{bits}", bits, _SCALES, "relative.h", relative=True) for bits in (4, 8)}
LOGARITHMS = _coded("logarithm", 8, Word("ranges", "float", 0, count=2), "lookup.h", "logarithms.h")
FLOAT8 = {
    signed: _coded(
        "float8", 8, _SCALES, "lookup.h", "table.h", "float8.h", constants=("ABSOLUTE" if signed else "UNSIGNED",)
    )
    for signed in (False, True)
}


@functools.lru_cache(maxsize=16)
def table_codec(coder: Coder, bits: int) -> Codec:
    """Codes of a codebook with one scale a block.

    Args:
        coder: of the codebook, on the host. Its negative values, if any, are the negatives of positive ones.
        bits: of a code.
    """
    table = Table.of(coder)
    kind = "UNSIGNED" if coder.lowest >= 0 else "ABSOLUTE" if coder.lowest == -1 else "SIGNED"
    constants = (kind, str(table.zero), str(table.first))
    name = "table" if bits == 8 else "packed_table"
    return _coded(name, bits, _SCALES, "lookup.h", "table.h", constants=constants, table=table)


def codec_source(codec: Codec, block: int) -> str:
    """A C file with a codec's two functions alone, on many blocks: for tests.

    ``encode`` and ``decode`` take (blocks, x, words, tables, second moment, key).
    """
    files = [source(name) for name in ("words.h", *codec.sources)]
    blocks = [f"(char *)words[{k}] + b * {word.nbytes(block)}" for k, word in enumerate(codec.words)]
    parts = [word.part_of(place) for word, place in zip(codec.words, blocks, strict=True)]
    tables = ["tables[0]", "tables[1]"] if codec.table is not None else []

    def more(beside: str) -> list[str]:
        return [*([f"v ? {beside} : 0"] if codec.relative else []), *tables, *codec.constants]

    random = "u16 random[BLOCK]; random_halves(random, b, key, 1);" if codec.random else ""
    words = [f"(void *)({place})" for place in blocks] if codec.blockwise else parts
    encode = [
        "x" if codec.blockwise else "x + o",
        *words,
        *(["random"] if codec.random else []),
        *more("v + b * BLOCK"),
    ]
    decode = [*parts, "x + o", *more("v + b * BLOCK + o")]
    signature = "(long blocks, float *x, void **words, const void **tables, const float *v, const u32 *key) {"
    loop, each = "for (long b = 0; b < blocks; b++, x += BLOCK) {", "" if codec.blockwise else "PARTS "
    functions = [
        f"void encode{signature} {loop} {random} {each}{codec.name}_encode({', '.join(encode)}); }} }}",
        f"void decode{signature} {loop} PARTS {codec.name}_decode({', '.join(decode)}); }} }}",
    ]
    return "\n".join([f"#define BLOCK {block}", *files, *functions])
