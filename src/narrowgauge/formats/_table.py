"""Tables of a float format: every code, every spacing, and the codes worth knowing.

Source: Lecture 11, Mixed Precision Training ("Float 16 (FP16)"; "The resolution in each period").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from narrowgauge.formats._float import FloatFormat


class CodeRow(NamedTuple):
    """One code of a format.

    Attributes:
        code: the bit pattern as an unsigned number.
        bits: the same, with its fields apart: sign, exponent, fraction.
        value: what it means.
        kind: ``"zero"``, ``"subnormal"``, ``"normal"``, ``"infinity"`` or ``"nan"``.
    """

    code: int
    bits: str
    value: float
    kind: str


class NotableRow(NamedTuple):
    """A code worth knowing: its `CodeRow` and why."""

    note: str
    row: CodeRow


class Binade(NamedTuple):
    """Numbers of equal spacing.

    Attributes:
        low, high: the interval [low, high).
        spacing: the distance between neighbours in it, one unit in the last place.
        numbers: how many numbers of the format lie in it.
    """

    low: float
    high: float
    spacing: float
    numbers: int


class CodeTable(Sequence[CodeRow]):
    """All codes of a format in order, each row made when it is read (fp32 has 2^32 of them)."""

    def __init__(self, fmt: FloatFormat) -> None:
        if not hasattr(fmt, "exponent_bits"):
            raise TypeError(f"fmt: got {type(fmt).__name__}, takes a FloatFormat")
        self._fmt = fmt

    def __len__(self) -> int:
        return int(1 << self._fmt.bits)

    @overload
    def __getitem__(self, index: int) -> CodeRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[CodeRow]: ...

    def __getitem__(self, index: int | slice) -> CodeRow | list[CodeRow]:
        if isinstance(index, slice):
            return [self[code] for code in range(*index.indices(len(self)))]
        code = index + len(self) if index < 0 else index
        if not 0 <= code < len(self):
            raise IndexError(f"code: got {index}, takes 0 to {len(self) - 1} for {self._fmt.name}")
        value = self._fmt.decode(code)
        return CodeRow(code, _fields(self._fmt, code), value, _kind(self._fmt, value))

    def __repr__(self) -> str:
        return f"CodeTable({self._fmt.name}, {len(self)} rows)"


def binades(fmt: FloatFormat) -> list[Binade]:
    """Intervals of equal spacing; the subnormals share theirs with the first binade of normal numbers."""
    first = math.ldexp(1.0, fmt.min_exponent + 1)
    rows = [Binade(0.0, first, fmt.min_subnormal, 2 << fmt.mantissa_bits)]
    for exponent in range(fmt.min_exponent + 1, fmt.max_exponent + 1):
        low = math.ldexp(1.0, exponent)
        spacing = math.ldexp(1.0, exponent - fmt.mantissa_bits)
        # Half-open intervals end one spacing above the largest number (2^1024 would not be a double).
        high = 2 * low if exponent < fmt.max_exponent else fmt.max + spacing
        rows.append(
            Binade(low, high, spacing, round((high - low) / spacing) if high < math.inf else 1 << fmt.mantissa_bits)
        )
    return rows


def notable(fmt: FloatFormat) -> list[NotableRow]:
    """The lecture's table for any format."""
    one, table = fmt.encode(1.0), fmt.table()
    first_normal = 1 << fmt.mantissa_bits
    codes = [("zero", 0)]
    if fmt.mantissa_bits:
        codes += [("smallest subnormal", 1), ("largest subnormal", first_normal - 1)]
    codes += [
        ("smallest normal", first_normal),
        ("nearest to 1/3", fmt.encode(1 / 3)),
        ("largest below one", one - 1),
        ("one", one),
        ("smallest above one", one + 1),
        ("largest", fmt.max_code),
    ]
    if fmt.has_infinity:
        codes.append(("infinity", fmt.infinity_code))
    if fmt.has_nan:
        codes.append(("NaN", fmt.nan_code))
    return [NotableRow(note, table[code]) for note, code in codes]


def _fields(fmt: FloatFormat, code: int) -> str:
    """Sign, exponent and fraction in binary, a space between."""
    bits = f"{code:0{fmt.bits}b}"
    return " ".join(
        part for part in (bits[0], bits[1 : 1 + fmt.exponent_bits], bits[1 + fmt.exponent_bits :]) if part
    )


def _kind(fmt: FloatFormat, value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "infinity"
    if value == 0:
        return "zero"
    return "normal" if abs(value) >= fmt.min_normal else "subnormal"
