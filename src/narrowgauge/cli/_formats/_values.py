"""What a number becomes in the formats: its code, the value that the code means, and the error, exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from narrowgauge.cli._errors import UsageError
from narrowgauge.cli._formats._codebooks import encode, span
from narrowgauge.cli._formats._floats import hexadecimal, ulp
from narrowgauge.cli._formats._names import FORMATS
from narrowgauge.cli._printer import MISSING, Printer, brief, exact, power, say_double, signed
from narrowgauge.formats import FloatFormat, codebook, codebook_map, codebook_names

_POWER = re.compile(r"([+-]?)2\^([+-]?[0-9]{1,4})")


def read_value(text: str) -> float:
    """The double nearest to what was typed: a decimal, a hexadecimal float, inf, nan, or a power such as 2^-14.

    Raises:
        UsageError: for anything else.
    """
    typed = text.strip()
    try:
        if found := _POWER.fullmatch(typed):
            return math.copysign(math.ldexp(1.0, int(found[2])), -1.0 if found[1] == "-" else 1.0)
        return float.fromhex(typed) if "0x" in typed.lower() else float(typed)
    except (ValueError, OverflowError):
        takes = "takes a number such as 0.1, 1e-8, 2^-14, 0x1p-3, inf or nan, of a double's range"
        raise UsageError(f"--value: got {text!r}, {takes}") from None


def inspect_everywhere(printer: Printer, typed: str, x: float) -> None:
    """The number in every float format and in every codebook."""
    say_double(printer, typed, x)
    _fates(printer, [Fate.of(fmt.name, fmt, x) for fmt in FORMATS])
    if not -1 <= x <= 1:
        printer.say(
            f"Codebooks: {typed} lies outside of [-1, 1], where their values are; "
            "a block is divided by its largest magnitude first."
        )
        return
    columns = ("codebook", "bits", "code", "signed", "error", "code", "unsigned", "error")
    printer.table(columns, [_in_codebook(name, x) for name in codebook_names()], gap=1)


def inspect_in_float(printer: Printer, typed: str, x: float, fmt: FloatFormat) -> None:
    """The number in one format, with the two neighbours of what it becomes."""
    say_double(printer, typed, x)
    code = fmt.encode(x)
    named = (("below", step(fmt, code, -1)), ("nearest", code), ("above", step(fmt, code, 1)))
    printer.title(f"In {fmt.name}, with the neighbours of what it becomes")
    _fates(printer, [Fate.of(name, fmt, x, to) for name, to in named if to is not None])


def step(fmt: FloatFormat, code: int, by: int) -> int | None:
    """The code of the next number up (1) or down (-1), infinities included; None if there is none."""
    sign = 1 << fmt.bits - 1
    place = code if code < sign else sign - code  # codes are sign and magnitude: minus zero is at zero too
    last = fmt.infinity_code if fmt.has_infinity else fmt.max_code
    place += by
    if abs(place) > last or math.isnan(fmt.decode(code)):
        return None
    return place if place >= 0 else sign - place


@dataclass(frozen=True)
class Fate:
    """A number and a code of a format, usually the nearest.

    Attributes:
        label: the first cell of its row.
        code: the code.
        error: what the code means, minus the number; None if either is not finite.
        ulp: the spacing of the format at the number; None beyond its range.
        note: what happened, in words; empty for a neighbour of the nearest.
    """

    label: str
    fmt: FloatFormat
    x: float
    code: int
    error: Fraction | None
    ulp: float | None
    note: str

    @classmethod
    def of(cls, label: str, fmt: FloatFormat, x: float, code: int | None = None) -> Fate:
        """What becomes of x in a format; or, given a code, how far that one is from x."""
        own = fmt.encode(x)
        code = own if code is None else code
        value, nearest = fmt.decode(code), fmt.decode(own)
        finite = math.isfinite(x) and math.isfinite(value)
        error = Fraction(value) - Fraction(x) if finite else None
        spacing = ulp(fmt, x) if math.isfinite(x) and not _overflows(fmt, x, nearest) else None
        return cls(label, fmt, x, code, error, spacing, _note(fmt, x, nearest) if code == own else "")

    @property
    def meaning(self) -> tuple[str, ...]:
        """Cells: label, code, bits, value."""
        row = self.fmt.table()[self.code]
        return self.label, hexadecimal(self.fmt, self.code), row.bits, exact(row.value)

    @property
    def errors(self) -> tuple[str, ...]:
        """Cells: label, error, relative error, error in ulps, ulp, note."""
        error = self.error
        relative = error / Fraction(self.x) if error is not None and self.x else None
        steps = error / Fraction(self.ulp) if error is not None and self.ulp else None
        spacing = MISSING if self.ulp is None else power(self.ulp)
        return self.label, signed(error), signed(relative), signed(steps), spacing, self.note


def _fates(printer: Printer, fates: Iterable[Fate]) -> None:
    """Two tables, since one would be wider than a terminal: what is kept, and how far it is off."""
    fates = list(fates)
    printer.table(("", "hex", "bits", "becomes"), [fate.meaning for fate in fates], left=("bits", "becomes"))
    columns = ("", "error", "relative", "in ulps", "ulp", "outcome")
    printer.table(columns, [fate.errors for fate in fates], left=("outcome",))


def _overflows(fmt: FloatFormat, x: float, becomes: float) -> bool:
    """Whether x is beyond the format: it became infinity, or there is none and it is above the largest number."""
    return math.isfinite(x) and abs(x) > fmt.max and not (fmt.has_infinity and math.isfinite(becomes))


def _note(fmt: FloatFormat, x: float, becomes: float) -> str:
    """What happened to x, in words."""
    if math.isnan(x):
        return "" if math.isnan(becomes) else f"no NaN: {exact(becomes)}"
    if math.isinf(x):
        return "" if math.isinf(becomes) else f"no infinity: {exact(becomes)}"
    if _overflows(fmt, x, becomes):
        return f"overflow: beyond {brief(fmt.max)}"
    if becomes == 0 != x:
        return f"underflow: 0 up to {power(fmt.min_subnormal / 2)}"
    kind = "exact" if becomes == x else "rounded"
    return kind if becomes == 0 or abs(becomes) >= fmt.min_normal else f"{kind}, subnormal"


def _in_codebook(name: str, x: float) -> list[str]:
    """A row: the codebook, its widest code, and code, value and error with sign and without."""
    found = codebook_map(name)
    cells = [name, span({max(widths) for widths in (found.signed_bits, found.unsigned_bits) if widths})]
    for signs, widths in ((True, found.signed_bits), (False, found.unsigned_bits)):
        if not widths or not (signs or x >= 0):
            cells += [MISSING] * 3
            continue
        values = codebook(name, signs, max(widths))
        code = encode(values, x)
        value = float(values[code])
        cells += [str(code), f"{value:.7g}", signed(Fraction(value) - Fraction(x))]
    return cells
