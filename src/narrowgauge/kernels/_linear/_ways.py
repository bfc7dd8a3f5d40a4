"""Which way a multiply goes: a kernel and its tile, or cuBLAS; a table of what is right without measuring.

A `Way` is chosen for a *kind*: the format, how the operands are scaled, what the result is kept in, the three
sides. What has been measured on this GPU (`_tuning`) comes first, then the table. No choice changes which numbers
are multiplied; with int8 every way gives the same bits.

The defaults are for Hopper. Measured on an H200 at six shapes of layers, in TFLOP/s: in int8 one way is the fastest
at all of them, 1156 to 1456, and the next best is 6% behind; in float8 it comes within 5% of cuBLAS with vectors of
scales (1160 to 1400) and 2% with one scale, where each is ahead at some shapes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kernel = Literal["pointers", "descriptors", "cublas"]


@dataclass(frozen=True)
class Way:
    """How a multiply is run.

    Attributes:
        kernel: ``"pointers"``: a tile a program. ``"descriptors"``: programs that stay and take one tile after the
            other, loaded and stored by the copy engine, the next one while the last is stored. ``"cublas"``:
            `torch._scaled_mm`, for float8.
        rows, columns, inner: sides of a tile; multiples of 16.
        warps, stages: threads by 32, and how many tiles of the operands are on their way at once.
        group: rows of tiles that are walked through together, for what the cache keeps.
        halves: whether a tile of the result is stored in two parts, which takes less shared memory (descriptors).
        resident: how many programs a multiprocessor has at once (descriptors).
    """

    kernel: Kernel
    rows: int = 128
    columns: int = 128
    inner: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 8
    halves: bool = False
    resident: int = 1

    def __str__(self) -> str:
        if self.kernel == "cublas":
            return "cublas"
        sides = f"{self.rows}x{self.columns}x{self.inner}"
        more = (" halves" if self.halves else "") + (f" r{self.resident}" if self.resident > 1 else "")
        return f"{self.kernel} {sides} w{self.warps} s{self.stages} g{self.group}{more}"

    def as_record(self) -> dict[str, Any]:
        """What a file keeps of it."""
        return asdict(self)


@dataclass(frozen=True)
class Kind:
    """What decides the way of a multiply (M, K) x (K, N).

    Attributes:
        format: ``"int8"``, or ``"float8"``.
        left, right: ``"vector"`` (a scale a row of the left, a column of the right operand) or ``"tensor"``.
        result: torch's name of the dtype of the result, such as ``"bfloat16"``.
        accumulation: ``"fast"`` or ``"full"``; of int8 always ``"full"``.
        rows, columns, inner: M, N, K.
    """

    format: str
    left: str
    right: str
    result: str
    accumulation: str
    rows: int
    columns: int
    inner: int

    @property
    def key(self) -> str:
        """A name for files."""
        sides = f"{self.rows}x{self.inner}x{self.columns}"
        return f"{self.format} {self.left} {self.right} {self.result} {self.accumulation} {sides}"


CUBLAS = Way("cublas")
# Two programs a multiprocessor, with one warp group each: one multiplies while the other stores.
_PAIRS = Way("descriptors", 128, 128, 128, warps=4, stages=3, halves=True, resident=2)
# What the copy engine does not take, and what has too few tiles to fill a GPU with large ones.
_MIDDLE = Way("pointers", 128, 128, 128, warps=8, stages=3)
_SMALL = Way("pointers", 64, 64, 128, warps=4, stages=3)
# Before Hopper, or after: tiles that fit where there is less shared memory, and kernels without its copy engine.
_ELSEWHERE = Way("pointers", 128, 128, 64, warps=8, stages=3)
# Tiles that a Hopper GPU works on at once, about.
_AT_ONCE = 132
# Products in a multiply, some 0.15 ms of them.
_WORTH = 1e11

# All that are for Hopper: each compiles to its wgmma, without spills, in at most 227 KiB of shared memory.
CANDIDATES: tuple[Way, ...] = (
    Way("pointers", 128, 128, 128, warps=4, stages=3),
    _MIDDLE,
    Way("pointers", 128, 128, 128, warps=8, stages=4),
    Way("pointers", 128, 256, 128, warps=8, stages=3),
    Way("pointers", 128, 256, 128, warps=8, stages=4),
    Way("pointers", 256, 128, 128, warps=8, stages=3),
    Way("pointers", 256, 128, 128, warps=8, stages=4),
    Way("pointers", 64, 128, 128, warps=4, stages=4),
    _SMALL,
    _PAIRS,
    Way("descriptors", 128, 128, 128, warps=8, stages=3, halves=True, resident=2),
    Way("descriptors", 128, 128, 128, warps=8, stages=5, halves=True),
    Way("descriptors", 128, 256, 128, warps=8, stages=3),
    Way("descriptors", 128, 256, 128, warps=8, stages=4, halves=True),
    Way("descriptors", 256, 128, 128, warps=8, stages=3),
    Way("descriptors", 256, 128, 128, warps=8, stages=4, halves=True),
    Way("descriptors", 256, 128, 128, warps=8, stages=4, group=16, halves=True),
    CUBLAS,
)


def fits(way: Way, kind: Kind, cublas: bool, descriptors: bool) -> bool:
    """Whether a way is one for a kind; the flags say what its operands, dtypes and GPU allow."""
    if way.kernel == "cublas":
        return cublas
    if way.kernel == "descriptors" and not descriptors:
        return False
    # Full accumulation keeps two accumulators: 64 numbers of each are what a thread's registers hold.
    full = kind.format == "float8" and kind.accumulation == "full"
    return not full or way.rows * way.columns <= 64 * 32 * way.warps


def default(kind: Kind, cublas: bool, descriptors: bool, hopper: bool) -> Way:
    """The way of a kind that was not measured; the flags say what its operands, dtypes and GPU allow."""
    if not hopper:
        return _ELSEWHERE
    tiles = kind.rows * kind.columns / (_PAIRS.rows * _PAIRS.columns)
    pairs = fits(_PAIRS, kind, cublas, descriptors) and tiles >= _AT_ONCE
    ours = _PAIRS if pairs else _MIDDLE if tiles >= _AT_ONCE else _SMALL
    if not cublas:
        return ours
    if "vector" in (kind.left, kind.right):
        # It wants a vector for each side, which are launches more: too many for a small multiply.
        return ours if kind.rows * kind.columns * kind.inner < _WORTH else CUBLAS
    # With one scale it is behind, but where few tiles have long sums.
    return _PAIRS if pairs and tiles >= 4 * _AT_ONCE else CUBLAS
