"""Configurations of a multiply: a kernel and its tile, or cuBLAS; and a table of defaults.

A `MatmulConfig` is chosen for a `MatmulShape`: the format, how the operands are scaled, the dtype of the result,
the three sides. A configuration that was measured on this GPU (`_autotune`) comes first, then the table. No choice
changes which numbers are multiplied; with int8 every configuration gives the same bits.

The defaults are for Hopper. Measured on an H200 at six shapes of layers, in TFLOP/s: in int8 one configuration is
the fastest at all of them, 1156 to 1456, and the next best is 6% slower; in float8 it comes within 5% of cuBLAS
with vectors of scales (1160 to 1400) and 2% with one scale, where each is faster at some shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["pointers", "descriptors", "cublas"]


@dataclass(frozen=True)
class MatmulConfig:
    """How a multiply is run.

    By ``"pointers"`` each program has a tile. With ``"descriptors"`` programs take one tile after the other, loaded
    and stored by the copy engine, the next one while the last is stored. ``"cublas"`` is `torch._scaled_mm`, for
    float8.
    """

    kernel: Kernel
    rows: int = 128  # sides of a tile; multiples of 16
    columns: int = 128
    inner: int = 128
    warps: int = 8
    stages: int = 3  # how many tiles of the operands are loaded at once
    group: int = 8  # rows of tiles that are walked through together, for the cache
    # Whether a tile of the result is stored in two parts: less shared memory (descriptors). With scales of blocks
    # it is multiplied in two parts, too: fewer registers.
    halves: bool = False
    resident: int = 1  # how many programs a multiprocessor has at once (descriptors)

    @property
    def registers(self) -> int:
        """The most that a thread may have for `resident` programs to share a multiprocessor."""
        return min(255, 65536 // (32 * self.warps * self.resident))

    def __str__(self) -> str:
        if self.kernel == "cublas":
            return "cublas"
        sides = f"{self.rows}x{self.columns}x{self.inner}"
        more = (" halves" if self.halves else "") + (f" r{self.resident}" if self.resident > 1 else "")
        return f"{self.kernel} {sides} w{self.warps} s{self.stages} g{self.group}{more}"


@dataclass(frozen=True)
class MatmulShape:
    """A multiply (M, K) x (K, N): everything that decides its configuration."""

    format: str  # "int8", or "float8"
    # "vector" (a scale a row of the left, a column of the right operand) or "tensor"; with scales of blocks
    # "blocks", of 128 along the sum, or "tiles" where 128 rows or columns share one too
    left: str
    right: str
    result: str  # torch's name of the dtype of the result, such as "bfloat16"
    accumulation: str  # "fast" or "full", of int8 always "full"; "blocks" with scales of blocks
    rows: int
    columns: int
    inner: int

    @property
    def key(self) -> str:
        """A name for files."""
        sides = f"{self.rows}x{self.inner}x{self.columns}"
        return f"{self.format} {self.left} {self.right} {self.result} {self.accumulation} {sides}"


CUBLAS = MatmulConfig("cublas")
# Two programs a multiprocessor, with one warp group each: one multiplies while the other stores.
_PAIRS = MatmulConfig("descriptors", 128, 128, 128, warps=4, stages=3, halves=True, resident=2)
# For operands that the copy engine does not take, and for too few tiles to fill a GPU with large ones.
_MIDDLE = MatmulConfig("pointers", 128, 128, 128, warps=8, stages=3)
_SMALL = MatmulConfig("pointers", 64, 64, 128, warps=4, stages=3)
# With scales of blocks: where columns share them in tiles, and where they do not.
_TILES = MatmulConfig("descriptors", 128, 128, 128, warps=8, stages=3, halves=True, resident=2)
_BLOCKS = MatmulConfig("descriptors", 64, 128, 128, warps=4, stages=3, resident=2)
# Before Hopper, or after: tiles that fit where there is less shared memory, and kernels without its copy engine.
_ELSEWHERE = MatmulConfig("pointers", 128, 128, 64, warps=8, stages=3)
# Tiles that a Hopper GPU works on at once, about.
_AT_ONCE = 132
# Products in a multiply: about 0.15 ms.
_WORTH = 1e11

# All that are for Hopper: each compiles to its wgmma, without spills, in at most 227 KiB of shared memory.
CANDIDATES: tuple[MatmulConfig, ...] = (
    MatmulConfig("pointers", 128, 128, 128, warps=4, stages=3),
    _MIDDLE,
    MatmulConfig("pointers", 128, 128, 128, warps=8, stages=4),
    MatmulConfig("pointers", 128, 256, 128, warps=8, stages=3),
    MatmulConfig("pointers", 128, 256, 128, warps=8, stages=4),
    MatmulConfig("pointers", 256, 128, 128, warps=8, stages=3),
    MatmulConfig("pointers", 256, 128, 128, warps=8, stages=4),
    MatmulConfig("pointers", 64, 128, 128, warps=4, stages=4),
    _SMALL,
    _PAIRS,
    _TILES,
    _BLOCKS,
    MatmulConfig("descriptors", 128, 128, 128, warps=8, stages=5, halves=True),
    MatmulConfig("descriptors", 128, 256, 128, warps=8, stages=3),
    MatmulConfig("descriptors", 128, 256, 128, warps=8, stages=4, halves=True),
    MatmulConfig("descriptors", 256, 128, 128, warps=8, stages=3),
    MatmulConfig("descriptors", 256, 128, 128, warps=8, stages=4, halves=True),
    MatmulConfig("descriptors", 256, 128, 128, warps=8, stages=4, group=16, halves=True),
    CUBLAS,
)


def fits(config: MatmulConfig, kind: MatmulShape, cublas: bool, descriptors: bool) -> bool:
    """Whether a config suits a multiply; the flags say what its operands, dtypes and GPU allow."""
    if config.kernel == "cublas":
        return cublas
    if config.kernel == "descriptors" and not descriptors:
        return False
    if kind.accumulation == "blocks":
        # A block along K is one tile's, and so are columns that share a scale. Sums beside a block's product: 64
        # numbers of each are what a thread's registers hold.
        small = config.rows * config.columns <= 64 * 32 * config.warps
        # Scales of columns, and sums of integers that become floats, take registers of their own.
        enough = config.registers > 128 or (kind.format == "float8" and kind.right != "blocks")
        return config.inner == 128 and max(config.rows, config.columns) <= 128 and small and enough
    # Full accumulation keeps two accumulators: 64 numbers of each are what a thread's registers hold.
    full = kind.format == "float8" and kind.accumulation == "full"
    return not full or config.rows * config.columns <= 64 * 32 * config.warps


def default(kind: MatmulShape, cublas: bool, descriptors: bool, hopper: bool) -> MatmulConfig:
    """The config of a multiply that was not measured; the flags say what its operands, dtypes and GPU allow."""
    if kind.accumulation == "blocks":
        if cublas:
            return CUBLAS
        large = descriptors and kind.rows * kind.columns >= _AT_ONCE * 64 * 128
        return next(config for config in (_TILES, _BLOCKS, _SMALL) if fits(config, kind, cublas, large))
    if not hopper:
        return _ELSEWHERE
    tiles = kind.rows * kind.columns / (_PAIRS.rows * _PAIRS.columns)
    pairs = fits(_PAIRS, kind, cublas, descriptors) and tiles >= _AT_ONCE
    ours = _PAIRS if pairs else _MIDDLE if tiles >= _AT_ONCE else _SMALL
    if not cublas:
        return ours
    if "vector" in (kind.left, kind.right):
        # cuBLAS needs a vector for each side: more launches, too many for a small multiply.
        return ours if kind.rows * kind.columns * kind.inner < _WORTH else CUBLAS
    # With one scale cuBLAS is slower, except where few tiles have long sums.
    return _PAIRS if pairs and tiles >= 4 * _AT_ONCE else CUBLAS
