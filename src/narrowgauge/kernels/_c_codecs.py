"""Calls of codecs in C: their functions are in `c/`, or in the text that a storage brings.

Numbers of a block are known when all of it is. So codecs with such numbers encode by the block; the others encode,
and all decode, by the part. Both lengths are compile-time constants. Codes of 4 bits are packed and unpacked here:
functions see one a byte.

    X_decode(words..., x, [second moment,] [values, cells, zero, first,] constants...)
    X_encode(x, words..., [random bits,] [second moment,] [values, cells, zero, first,] constants...)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from narrowgauge.kernels._codec import Codec, Word, text_of

_SOURCES = Path(__file__).parent / "c"
# What C calls a float dtype: its elements, and the functions that convert them, `from_NAME` and `to_NAME`.
FLOATS = {
    torch.float32: ("float", "float32"),
    torch.bfloat16: ("u16", "bfloat16"),
    torch.float16: ("_Float16", "float16"),
}


def source(part: str | Path) -> str:
    """A file of `c/` by its name, another by its path, or a text of several lines itself."""
    ours = isinstance(part, str) and "\n" not in part and (_SOURCES / part).exists()
    return text_of(_SOURCES / part if ours else part)


def part_of(word: Word, block: str) -> str:
    """The address in C of the part of a block that begins at element o, from the block's address."""
    return f"(void *)({block} + o * {word.bits} / 8)" if word.bits else f"(void *)({block})"


def decode(codec: Codec, blocks: Sequence[str], x: str, normalizer: str, tables: Sequence[str]) -> str:
    """A statement that decodes the part from o on.

    Args:
        codec: whose.
        blocks: where its words have the block.
        x: where the part's values go.
        normalizer: where the part's second moment is.
        tables: the two arrays of its table, if it has one.
    """
    places, unpacked = [], []
    for k, (word, block) in enumerate(zip(codec.words, blocks, strict=True)):
        place = part_of(word, block)
        if word.packed:
            unpacked.append(f"u8 codes{k}[PART]; unpack({place}, codes{k}, PART);")
            place = f"codes{k}"
        places.append(place)
    arguments = [*places, x, *_further(codec, normalizer, tables)]
    return f"{{ {' '.join(unpacked)} {codec.name}_decode({', '.join(arguments)}); }}"


def encode(codec: Codec, blocks: Sequence[str], x: str, random: str, normalizer: str, tables: Sequence[str]) -> str:
    """A statement that encodes a block, or the part from o on where nothing asks for blocks.

    Args:
        codec, blocks, normalizer, tables: as for `decode`.
        x: where the values are; of a normalized codec, one is made zero where its second moment is no unit.
        random: where 16 random bits an element are, if it takes some.
    """
    places, unpacked, packing = [], [], []
    for k, (word, block) in enumerate(zip(codec.words, blocks, strict=True)):
        place = f"(void *)({block})" if codec.blockwise else part_of(word, block)
        if word.packed:
            unpacked.append(f"u8 codes{k}[BLOCK];")
            packing.append(f"pack(codes{k}, {place});")
            place = f"codes{k}"
        places.append(place)
    arguments = [x, *places, *([random] if codec.needs_random else []), *_further(codec, normalizer, tables)]
    known = f"forget_unknown({x}, {normalizer});" if codec.normalized else ""
    return f"{{ {known} {' '.join(unpacked)} {codec.name}_encode({', '.join(arguments)}); {' '.join(packing)} }}"


def _further(codec: Codec, normalizer: str, tables: Sequence[str]) -> list[str]:
    table = [*tables, str(codec.table.zero), str(codec.table.first)] if codec.table is not None else []
    return [*([normalizer] if codec.normalized else []), *table, *map(str, codec.constants)]
