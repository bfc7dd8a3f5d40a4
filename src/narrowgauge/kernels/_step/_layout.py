"""What a step kernel works on: words and where their addresses are.

One row of the table a tensor, in int64: `COLUMNS` first, then an address a word of the moments. Of a parameter that
ranks share, `numel` counts what lies here, `elements` the whole, and `origin` is where its random numbers begin.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = (
    "p", "grad", "low", "first", "pass_first", "passes", "numel", "seed", "stream", "count", "skipped", "hyper",
    "elements", "origin",
)  # fmt: skip
WIDTH = 20
AT = {name: number for number, name in enumerate(COLUMNS)}

# Bytes and Triton's name of a word as kernels load it: narrow floats as their bits.
WORDS = {
    "bf16": "int16",
    "fp16": "int16",
    "fp32": "float32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int16": 2, "int8": 1, "uint8": 1, "int32": 4}
LOW = {"split": "int16", "split8": "int8", "master": "fp32", "kahan": "", "expansion": ""}  # empty: the parameter's


@dataclass(frozen=True)
class Word:
    """A tensor of a moment's words.

    Attributes:
        name: as the storage calls it; empty for the only one.
        kind: what it holds.
        per: ``"element"``, ``"pair"`` (two codes a byte) or ``"block"``.
        part: which of the numbers that a block has here, of how many.
    """

    name: str
    kind: str
    per: str = "element"
    part: tuple[int, int] = (0, 1)

    @property
    def label(self) -> str:
        """A name of its own for a part."""
        return self.name if self.part[1] == 1 else f"{self.name}{self.part[0]}"


STATES: dict[str, tuple[Word, ...]] = {
    "fp32": (Word("", "fp32"),),
    "bf16": (Word("", "bf16"),),
    "expansion": (Word("hi", "bf16"), Word("lo", "bf16")),
    "8bit": (Word("codes", "uint8"), Word("scales", "fp32", "block")),
    "fp8": (Word("codes", "uint8"), Word("scales", "fp32", "block")),
    "4bit": (Word("codes", "uint8", "pair"), Word("scales", "fp32", "block")),
    "pattern8": (Word("codes", "uint8"), Word("ranges", "int32", "block")),
    "pattern4": (
        Word("codes", "uint8", "pair"),
        Word("ranges", "int32", "block", (0, 2)),
        Word("ranges", "int32", "block", (1, 2)),
    ),
    "signed8": (
        Word("codes", "uint8"),
        Word("ranges", "fp32", "block", (0, 2)),
        Word("ranges", "fp32", "block", (1, 2)),
    ),
    "relative8": (Word("codes", "uint8"), Word("scales", "fp32", "block")),
    "relative4": (Word("codes", "uint8", "pair"), Word("scales", "fp32", "block")),
}


@dataclass(frozen=True)
class Moment:
    """A moment and how it is kept.

    Attributes:
        name: the slot's.
        storage: a key of `STATES`.
        signed: whether it has a sign.
        beside: the moment in whose root's units it is kept.
        purpose: of its random bits.
        table: the number of its codebook's tables among the kernel's.
    """

    name: str
    storage: str
    signed: bool
    beside: str | None = None
    purpose: int = 0
    table: int | None = None

    @property
    def words(self) -> tuple[Word, ...]:
        return STATES[self.storage]

    @property
    def hands_over(self) -> bool:
        return self.storage.startswith(("relative", "signed"))


@dataclass(frozen=True)
class Layout:
    """All that a step kernel's code depends on but the equation.

    Attributes:
        weight: the weight storage's name.
        kind, grad: what the parameter and its gradient hold: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        moments: in the order of the rule.
        block: elements a block, a power of two of at least 64.
        aligned: whether every address is a multiple of 16 bytes.
        negate: whether the gradient counts with its other sign.
        cells: (first key, the code that mirrors 0) of each codebook's table.
        gauges: whether sums of what the step does to the weight are worked out too; see `_gauges`.
        turns: ``"sample"`` for the programs that measure while others do not, ``"rest"`` for these, or empty for
            all programs; see `_sampling`.
        shared: whether ranks share the parameters: random numbers begin elsewhere than at the first element then.
    """

    weight: str
    kind: str
    grad: str
    moments: tuple[Moment, ...]
    block: int
    aligned: bool
    negate: bool = False
    cells: tuple[tuple[int, int], ...] = ()
    gauges: bool = False
    turns: str = ""
    shared: bool = False

    @property
    def blockwise(self) -> bool:
        """Whether anything is kept in blocks."""
        return any(word.per == "block" for moment in self.moments for word in moment.words)

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
        """Units a program, 30 at most. Where there is little to compute, as many programs as can be do best."""
        if not self.blockwise:
            return 1
        return 8 if all(moment.storage == "fp8" for moment in self.moments) else 16

    @property
    def pass_units(self) -> int:
        """Units a program of a pass that only reads: it ends with a sum over the program, which takes time."""
        return max(1, 4096 // self.unit)

    @property
    def registers(self) -> int:
        """The most a thread may have: as many programs as possible, with nothing of the ordinary way in memory."""
        wide = self.low is not None
        if not self.blockwise:
            return (96 if wide else 64) if self.gauges else 128
        if self.gauges:
            return 128 if wide else 96
        if any(moment.storage.startswith(("pattern", "signed")) for moment in self.moments):
            return 96 if wide else 88
        return 80 if wide else 72

    @property
    def low(self) -> str | None:
        """What the low word holds."""
        return (LOW[self.weight] or self.kind) if self.weight in LOW else None

    @property
    def vector(self) -> int:
        """Elements that a thread takes in a row: 16 bytes of the widest word."""
        kinds = [self.kind, self.grad, *([self.low] if self.low else [])]
        kinds += [word.kind for moment in self.moments for word in moment.words if word.per != "block"]
        return 16 // max(BYTES[kind] for kind in kinds)

    @property
    def warps(self) -> int:
        """Warps a program."""
        return max(1, self.unit // self.each)

    def columns(self) -> dict[tuple[str, str], int]:
        """Columns of the moments' words."""
        words = [(moment.name, word.name) for moment in self.moments for word in moment.words]
        return {word: len(COLUMNS) + number for number, word in enumerate(words)}
