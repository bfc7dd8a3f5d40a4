"""How a storage keeps its numbers, said once for Python, C and Triton.

A storage's specification is eager torch. Its kernels are functions that work on a block: ``X_decode`` and
``X_encode`` for a state storage whose codec is named X, ``X_read`` and ``X_add`` for a weight storage. A `Codec`
has their name, the tensors that they read and write, and what else they are given; `_c_source` and `_step._codecs`
write the calls, and nothing else in the kernels knows a storage. docs/add_a_storage.md adds one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.formats import Coder

# What kernels call a dtype, and its bytes.
KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
BYTES = {kind: dtype.itemsize for dtype, kind in KINDS.items()}
_ONE = 0x3F80  # the upper half of the pattern of 1
# What a scale is, of codebook and float8 codecs: the largest of numbers that are not negative, the extremum,
# its magnitude.
UNSIGNED, SIGNED, ABSOLUTE = range(3)


@dataclass(frozen=True)
class Word:
    """A tensor that a storage keeps.

    Attributes:
        name: its key among the storage's tensors; empty for the only one.
        kind: what it holds, a value of `KINDS`.
        packed: whether it holds two codes of 4 bits a byte.
        per_block: how many numbers of it a block has; 0 where each element has one.
    """

    name: str
    kind: str
    packed: bool = False
    per_block: int = 0

    @property
    def bits(self) -> int:
        """Of an element; 0 for numbers of a block."""
        return 0 if self.per_block else 4 if self.packed else 8 * BYTES[self.kind]

    @property
    def coded(self) -> bool:
        """Whether it holds codes."""
        return self.kind == "uint8" and not self.per_block

    def nbytes(self, elements: int) -> int:
        """Bytes of it that a block of this many elements takes."""
        return (elements * self.bits + 7) // 8 if self.bits else BYTES[self.kind] * self.per_block


@dataclass(frozen=True, eq=False)
class CodebookTable:
    """A codebook whose codes are found by one look-up: a cell for each upper half of a float's pattern.

    The upper half of a cell is the code at its start. The lower half, added to a pattern's lower half, carries
    above the one boundary inside. Cells are of positive numbers: negative ones count down from the code of zero.
    """

    values: NDArray[np.float32]  # (256,), what codes mean
    cells: NDArray[np.uint32]
    zero: int  # the code of zero
    first: int  # the upper half of the first cell's patterns; all smaller ones belong to this cell

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, coder: Coder) -> CodebookTable:
        """The table of a coder, the same one each time.

        Raises:
            ValueError: if negative values do not mirror positive ones, two boundaries fall into one cell, or one
                lies so near to 1 that rounding passes it.
        """
        values, boundaries = coder.values.cpu().numpy(), coder.boundaries.cpu().numpy()
        mirrored = -values[values < 0][::-1]
        if not np.array_equal(mirrored, values[values > 0][: len(mirrored)]):
            raise ValueError("the negative values must mirror the positive ones")
        positive = boundaries[boundaries > 0]
        patterns = positive.view(np.uint32)
        upper = patterns >> 16
        if len(np.unique(upper)) < len(upper):
            raise ValueError("boundaries must lie in different cells of the table, two are in one")
        if positive[-1] > 1 - 2.0**-20:
            raise ValueError(f"the outermost boundary must be at most 1 - 2^-20, got {positive[-1]}")
        first = int(upper[0]) - 1
        carry = np.zeros(_ONE - first + 1, dtype=np.uint32)
        carry[upper - first] = 0xFFFF - (patterns & 0xFFFF)
        below = np.searchsorted(upper, np.arange(first, _ONE + 1), side="left").astype(np.uint32)
        padded = np.pad(values, (0, 256 - len(values)))
        return cls(padded, (below << 16 | carry).astype(np.uint32), len(boundaries) - len(positive), first)

    @functools.cached_property
    def entries(self) -> NDArray[np.uint32]:
        """The cells minus their first patterns: with a pattern added, the upper half is its code."""
        return self.cells - (np.arange(self.first, _ONE + 1, dtype=np.uint32) << 16)

    @functools.lru_cache(maxsize=64)  # noqa: B019  # tables live as long as the process, too
    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(values, cells) on a device: float32, and int32 with the code of zero added."""
        cells = self.cells + np.uint32(self.zero << 16)
        # A discarded step may look beyond 1.
        cells = np.pad(cells, (0, (1 << 15) - self.first - len(cells)), mode="edge")
        return torch.from_numpy(self.values).to(device), torch.from_numpy(cells.view(np.int32)).to(device)


@dataclass(frozen=True)
class Codec:
    """How a storage keeps numbers.

    Attributes:
        name: of its functions, before ``_decode`` and ``_encode`` (of a weight's, before ``_read`` and ``_add``).
        words: its tensors, in the order in which the functions have them.
        c: what C has to read before its functions are called, one or several: files of `kernels/c`, paths, or
            texts; None where it has no such functions.
        triton: its Triton functions, as a path or a text; empty if `kernels/_step` has them, None if there are
            none. A str of one line is a path here and in `c`.
        constants: integers that the functions are given last.
        table: for look-ups: its arrays are given before the constants.
        normalized: whether a moment is kept in units of another one's root, which the functions are given.
        error_feedback: whether the weight is given what a moment loses.
        needs_random: whether encoding takes random bits: 16 an element, of a weight 8 or 32.
        wide_random: whether a weight takes 32.
        scaled: whether a weight has a scale of the whole tensor; see `_step._codecs` and, of C, `float8_weights.h`.
        pairs: whether Triton loads a weight's 16-bit words by twos and 8-bit words by fours, in 32 bits.
        registers: the most that a thread of a Triton program needs for this; see `Layout.registers`.
        units: how many units a Triton program does best with; see `Layout.units`.
    """

    name: str
    words: tuple[Word, ...] = ()
    c: tuple[str | Path, ...] | str | Path | None = ()
    triton: str | Path | None = ""
    constants: tuple[int, ...] = ()
    table: CodebookTable | None = None
    normalized: bool = False
    error_feedback: bool = False
    needs_random: bool = False
    wide_random: bool = False
    scaled: bool = False
    pairs: bool = False
    registers: int = 72
    units: int = 16

    @property
    def c_parts(self) -> tuple[str | Path, ...]:
        """What C has to read, in order."""
        return self.c if isinstance(self.c, tuple) else () if self.c is None else (self.c,)

    @property
    def blockwise(self) -> bool:
        """Whether a block is encoded at once: for units, random bits, numbers of a block, or packed codes."""
        return self.normalized or self.needs_random or any(word.per_block or word.packed for word in self.words)


def disown(storage: type, *functions: str) -> None:
    """Take a codec that a class inherits away where the class replaces a function that the codec describes."""
    if "codec" not in vars(storage) and not set(functions).isdisjoint(vars(storage)):
        storage.codec = lambda self, *given, **named: None  # type: ignore[attr-defined]


def text_of(part: str | Path) -> str:
    """A text of several lines itself, or that of the file at a path."""
    return part if isinstance(part, str) and "\n" in part else Path(part).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Moment:
    """A moment of a step."""

    name: str  # the graph's name for it
    codec: Codec
    normalizer: str | None = None  # the moment whose root is its unit
    purpose: int = 1  # of its random bits, from 1


def weight_purpose(moments: Iterable[Moment]) -> int:
    """The purpose of the random bits of a weight that takes 8: those of a moment, or 0 for bits of its own.

    Of 16 bits a moment's rounding depends on the upper ones, so the lower eight serve a second number.
    """
    return next((moment.purpose for moment in moments if moment.codec.needs_random), 0)


def in_order(moments: Iterable[Moment]) -> list[Moment]:
    """The moments, normalizers first."""
    return sorted(moments, key=lambda moment: moment.normalizer is not None)
