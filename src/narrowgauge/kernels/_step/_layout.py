"""What a step kernel works on: tensors and where their addresses are.

One row of the table a tensor, in int64: `COLUMNS` first, then an address a tensor of the moments. Of a parameter
that ranks share, `numel` counts the local elements, `elements` the whole, and `origin` is where its random numbers
begin.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.kernels._codec import BYTES, CodebookTable, Codec, Moment

COLUMNS = (
    "p", "grad", "low", "first", "pass_first", "passes", "numel", "seed", "stream", "count", "skipped", "hyper",
    "elements", "origin",
)  # fmt: skip
WIDTH = 20
AT = {name: number for number, name in enumerate(COLUMNS)}


@dataclass(frozen=True)
class Layout:
    """All that a step kernel's code depends on but the equation.

    Attributes:
        weight: how the weight is kept.
        kind, grad: what the parameter and its gradient hold: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        moments: in the order of the rule.
        block: elements a block, a power of two of at least 64.
        aligned: whether every address is a multiple of 16 bytes.
        negate: whether the gradient counts with its other sign.
        gauges: whether sums of what the step does to the weight are worked out too; see `_stats`.
        shared: whether ranks share the parameters: random numbers then begin at `origin` instead of 0.
    """

    weight: Codec
    kind: str
    grad: str
    moments: tuple[Moment, ...]
    block: int
    aligned: bool
    negate: bool = False
    gauges: bool = False
    shared: bool = False

    @property
    def blockwise(self) -> bool:
        """Whether anything is kept in blocks."""
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
        """Warps a program."""
        return max(1, self.unit // self.each)

    @property
    def tables(self) -> tuple[CodebookTable, ...]:
        """Of the moments' codebooks, each once."""
        tables = [moment.codec.table for moment in self.moments]
        return tuple(dict.fromkeys(table for table in tables if table is not None))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The weight's and the moments'."""
        return (self.weight, *(moment.codec for moment in self.moments))

    def columns(self) -> dict[tuple[str, str], int]:
        """Columns of the moments' tensors, by the moment's and the tensor's name."""
        words = [(moment.name, word.name) for moment in self.moments for word in moment.codec.words]
        return {word: len(COLUMNS) + number for number, word in enumerate(words)}
