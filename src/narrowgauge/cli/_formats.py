"""`narrowgauge formats`: look at any number format, and at what a number becomes in it.

Without a name it lists what there is; with one it shows that float format or codebook; `--value` follows a number
into the formats; `--plot` draws. Options that make no sense together are refused by name.

Source: Lecture 11, Mixed Precision Training ("Float 16 (FP16)"; "The resolution in each period").
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.cli._console import MISSING, Printer
from narrowgauge.cli._files import UsageError, picture_path, write_output
from narrowgauge.cli._format_names import FORMATS, find
from narrowgauge.cli._options import FormatsOptions
from narrowgauge.formats import (
    CodebookMap,
    Coder,
    FloatFormat,
    NotableRow,
    codebook,
    codebook_map,
    codebook_names,
)

# `--codes` lists formats of at most this many bits.
_MOST_BITS_LISTED = 8
# A page shows this many binades in full; of more, the ends and those around one.
_MOST_BINADES, _ENDS, _AROUND_ONE = 48, 3, 5
_PER_LINE = 4  # values of a codebook
# Doubles with longer expansions are shown in hexadecimal alone.
_MOST_DIGITS = 72
_POWER = re.compile(r"([+-]?)2\^([+-]?[0-9]{1,4})")


class Shown(NamedTuple):
    """A codebook at a width, with or without sign."""

    map: CodebookMap
    signed: bool
    bits: int

    @property
    def values(self) -> Tensor:
        """Its values, sorted."""
        return codebook(self.map.name, self.signed, self.bits)

    @property
    def title(self) -> str:
        """Its name, width and sign."""
        return f"{self.map.name}, {self.bits} bits, {'signed' if self.signed else 'unsigned'}"


def formats(options: FormatsOptions) -> int:
    """Show what was asked for."""
    found = _check(options)
    if options.plot is not None:
        return _plot(options, found, Path(options.plot))
    printer = Printer()
    if options.value is not None:
        x = read_value(options.value)
        if isinstance(found, CodebookMap):
            _value_in_codebook(printer, options.value, x, shown(found, options))
        elif found is not None:
            _value_in_float(printer, options.value, x, found)
        else:
            _value_everywhere(printer, options.value, x)
    elif isinstance(found, CodebookMap):
        _codebook_page(printer, shown(found, options), options.codes)
    elif found is not None:
        _float_page(printer, found, options)
    else:
        _listing(printer)
    return 0


def _check(options: FormatsOptions) -> FloatFormat | CodebookMap | None:
    """Find what NAME means, and refuse options that do not apply to it."""
    if options.value is not None and options.plot is not None:
        raise UsageError("--plot and --value must not be given together")
    if options.name is None:
        _refuse(options, ("codebook", "unsigned", "bits", "all", "codes"), "must be given with a NAME")
        return None
    found = find(options.name, options.codebook)
    if isinstance(found, FloatFormat):
        also = " (with --codebook: the codebook)" if found.name in codebook_names() else ""
        _refuse(
            options, ("unsigned", "bits"), f"must be given with a codebook, got the float format {found.name}{also}"
        )
        if options.codes and found.bits > _MOST_BITS_LISTED:
            codes = f"{found.name}, which has 2^{found.bits} codes"
            raise UsageError(
                f"--codes must be given with a format of at most {_MOST_BITS_LISTED} bits, got {codes}"
            )
    else:
        _refuse(options, ("all",), f"must be given with a float format, got the codebook {found.name}")
    for what in ("value", "plot"):
        if getattr(options, what) is not None:
            _refuse(options, ("all", "codes"), f"must not be given with --{what}")
    return found


def _refuse(options: FormatsOptions, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(options, name) not in (None, False):
            raise UsageError(f"--{name} {why}")


def _plot(options: FormatsOptions, found: FloatFormat | CodebookMap | None, path: Path) -> int:
    # Drawing needs matplotlib, which takes longer to import than everything else here.
    from narrowgauge.cli import _formats_charts
    from narrowgauge.cli._charts import save_figure

    if path == Path():
        path = Path("runs") / (f"formats-{found.name}.svg" if found else "formats.svg")
    path = picture_path("--plot", path)
    if isinstance(found, FloatFormat):
        figure = _formats_charts.spacing(found)
    else:
        it = None if found is None else shown(found, options)
        figure = _formats_charts.maps(it.map.name if it else None, it.signed if it else True, it.bits if it else 8)
    write_output("--plot", path, save_figure(figure, path, outlines=True))
    Printer().line(str(path))
    return 0


def shown(found: CodebookMap, options: FormatsOptions) -> Shown:
    """A codebook as asked for: with sign unless it has none, at its widest code where no width is given."""
    unsigned, bits = options.unsigned or not found.signed_bits, options.bits
    widths = found.unsigned_bits if unsigned else found.signed_bits
    if not widths:
        raise UsageError(f"--unsigned must be given with a codebook that is defined without sign, got {found.name}")
    if bits is not None and bits not in widths:
        wanted = f"{span(widths)} for {found.name} {'without' if unsigned else 'with'} sign"
        raise UsageError(f"--bits must be {wanted}, got {bits}")
    return Shown(found, not unsigned, max(widths) if bits is None else bits)


def span(widths: Iterable[int]) -> str:
    """Code widths as 2-8."""
    found = sorted(widths)
    if not found:
        return MISSING
    return f"{found[0]}" if len(found) == 1 else f"{found[0]}-{found[-1]}"


def ulp(fmt: FloatFormat, x: float) -> float:
    """The spacing of the format at a number."""
    return float(fmt.ulp(torch.tensor(x, dtype=torch.float64)))


def hexadecimal(fmt: FloatFormat, code: int) -> str:
    """A code in as many hexadecimal digits as the format needs."""
    return f"{code:0{(fmt.bits + 3) // 4}x}"


def encode(values: Tensor, x: float) -> int:
    """The code of a codebook's nearest value, as the library encodes: of x in float32."""
    return int(Coder.of(values).encode(torch.tensor(x, dtype=torch.float32)))


# The list.


def _listing(printer: Printer) -> None:
    rows = []
    for fmt in FORMATS:
        top = "inf, NaN" if fmt.has_infinity else "numbers, 1 NaN" if fmt.has_nan else "numbers"
        powers = (power(fmt.min_normal), power(fmt.min_subnormal), power(ulp(fmt, 1.0)))
        rows.append((fmt.name, f"1+{fmt.exponent_bits}+{fmt.mantissa_bits}", f"{fmt.max:.6g}", *powers, top))
    columns = (
        "\nFloat formats", "bits\ns+e+f", "\nlargest", "smallest\nnormal", "smallest\nsubnormal", "\nulp(1)",
        "top exponent\nmeans",
    )  # fmt: skip
    printer.table(columns, rows, left=("bits\ns+e+f", "top exponent\nmeans"))
    lines: list[list[str]] = []
    words = []
    for name in codebook_names():
        found = codebook_map(name)
        cells = [name]
        for sign, widths in ((True, found.signed_bits), (False, found.unsigned_bits)):
            values = codebook(name, sign, max(widths)) if widths else None
            least = MISSING if values is None else f"{float(values[values > 0][0]):.2e}"
            cells += [span(widths), MISSING if values is None else str(len(values)), least]
        lines.append(cells)
        words.append((name, f"{found.summary} ({found.source})"))
    numbers = ("\nvalues", "smallest\n> 0")
    printer.table(("\nCodebooks", "signed\nbits", *numbers, "unsigned\nbits", *numbers), lines)
    printer.table(("", ""), words)
    printer.say(
        "narrowgauge formats NAME shows one, or a float layout of your own such as e3m4. "
        "--value 0.1 shows what a number becomes in each. --plot draws."
    )


# The page of a float format: fields, range, notable codes, resolution.


def _float_page(printer: Printer, fmt: FloatFormat, options: FormatsOptions) -> None:
    printer.title(f"{fmt.name}: {fmt.bits} bits" + (f", {fmt.dtype}" if fmt.dtype is not None else ""))
    printer.say(f"  s | {'e' * fmt.exponent_bits} | {'f' * fmt.mantissa_bits}")
    printer.table(("", "", ""), _translation(fmt), indent=2)
    printer.title("Range")
    printer.table(("", "", ""), _range(fmt), indent=2)
    columns = ("Notable codes", "hex", "", "value", "note")
    printer.table(columns, _notable(fmt), left=("", "hex", "value", "note"), gap=1)
    rows, left_out = _binades(fmt, options.all)
    printer.title("Resolution: from min to max, neighbors are one interval apart")
    printer.table(("min", "max", "interval", "", "numbers"), rows)
    if left_out:
        printer.say(f"{left_out} binades are left out; --all shows them.")
    if fmt.name in codebook_names():
        printer.say(f"As a codebook, over its largest: narrowgauge formats {fmt.name} --codebook")
    if options.codes:
        _all_codes(printer, fmt)


def _all_codes(printer: Printer, fmt: FloatFormat) -> None:
    """Every code from zero up, a line for those that share all bits but the last two."""
    low, table = min(fmt.mantissa_bits, 2), fmt.table()
    rows = []
    for first in range(0, 1 << fmt.bits - 1, 1 << low):
        bits = table[first].bits
        values = [number(table[code].value) for code in range(first, first + (1 << low))]
        rows.append((hexadecimal(fmt, first), bits[: len(bits) - low].rstrip(), *values))
    printer.title(f"All codes from zero up; the negative numbers have {1 << fmt.bits - 1:#x} more")
    printer.table(("hex", "bits", *(f"..{last:0{low}b}" for last in range(1 << low))), rows, left=("bits",))


def _translation(fmt: FloatFormat) -> list[tuple[str, str, str]]:
    """What s, e and f mean: subnormal numbers, normal ones, and the specials."""
    steps = f"2^{fmt.mantissa_bits}" if fmt.mantissa_bits > 16 else str(1 << fmt.mantissa_bits)
    top = (1 << fmt.exponent_bits) - 1
    rows = [
        ("e = 0", f"(-1)^s * 2^{fmt.min_exponent} * f/{steps}", "zero and subnormal numbers"),
        (f"e = 1 to {top - fmt.has_infinity}", f"(-1)^s * 2^(e - {fmt.bias}) * (1 + f/{steps})", "normal numbers"),
    ]
    if fmt.has_infinity:
        rows.append((f"e = {top}", "infinity if f = 0, else NaN", ""))
    elif fmt.has_nan:
        rows.append((f"e = {top}", f"NaN if f = {(1 << fmt.mantissa_bits) - 1}, no infinity", ""))
    return rows


def _range(fmt: FloatFormat) -> list[tuple[str, str, str]]:
    """The ends of the format, and what falls off at each."""

    def both(x: float) -> str:
        return power(x) if power(x) == number(x) else f"{power(x)} = {number(x)}"

    # Overflow is halfway from the largest number to where the next would be, or right above the largest.
    beyond = f"infinity from {number(fmt.max + ulp(fmt, fmt.max) / 2)}"
    one = ulp(fmt, 1.0)
    return [
        ("largest", number(fmt.max), beyond if fmt.has_infinity else f"{number(fmt.max)} for all above it"),
        ("smallest normal", both(fmt.min_normal), ""),
        ("smallest subnormal", both(fmt.min_subnormal), f"zero up to {power(fmt.min_subnormal / 2)}"),
        ("ulp(1)", both(one), f"1 + x = 1 for x up to {power(one / 2)}"),
        ("finite numbers", str(2 * fmt.max_code + 1), "counting zero once"),
    ]


def _notable(fmt: FloatFormat) -> list[tuple[str, str, str, str, str]]:
    """The lecture's table; a code that is notable twice has one row."""

    def code_of(notable: NotableRow) -> int:
        return notable.row.code

    digits = 9 if fmt.mantissa_bits <= 23 else 11
    rows = []
    for code, group in groupby(sorted(fmt.notable(), key=code_of), key=code_of):
        same = list(group)
        row, formula = same[0].row, ""
        if 0 < code <= fmt.max_code and fmt.bits <= 16:
            field, fraction = divmod(code, 1 << fmt.mantissa_bits)
            steps = 1 << fmt.mantissa_bits
            formula = f"2^{max(field, 1) - fmt.bias} ({1 if field else 0} + {fraction}/{steps})"
        value = "infinity" if row.value == math.inf else number(row.value, digits).replace("nan", "NaN")
        rows.append((row.bits, hexadecimal(fmt, code), formula, value, ", ".join(n.note for n in same)))
    return rows


def _binades(fmt: FloatFormat, every: bool) -> tuple[list[tuple[str, ...]], int]:
    """Rows of the resolution table, and how many are left out."""
    binades = fmt.binades()
    kept = list(range(len(binades)))
    if not every and len(binades) > _MOST_BINADES:
        one = next(i for i in kept if binades[i].low <= 1 < binades[i].high)
        kept = [*kept[:_ENDS], *kept[one - _AROUND_ONE : one + _AROUND_ONE], *kept[-_ENDS:]]
    rows: list[tuple[str, ...]] = []
    for previous, index in pairwise([-1, *kept]):
        if index != previous + 1:
            rows.append(("...",) * 3)
        binade = binades[index]
        high = power(binade.high) if binade.high < math.inf else "2^1024"
        spacing = power(binade.spacing)
        decimal = "" if spacing == number(binade.spacing) else f"{binade.spacing:.3g}"
        rows.append((power(binade.low), high, spacing, decimal, str(binade.numbers)))
    return rows, len(binades) - len(kept)


# The page of a codebook: extent, decades, values.


def _codebook_page(printer: Printer, it: Shown, codes: bool) -> None:
    values = it.values.to(torch.float64).numpy()
    smallest, gaps = float(values[values > 0][0]), np.diff(values)
    widest = int(gaps.argmax())
    printer.title(it.title)
    printer.say(f"{it.map.summary} ({it.map.source})")
    facts = [
        ("code bits", f"{span(it.map.signed_bits)} signed, {span(it.map.unsigned_bits)} unsigned", ""),
        ("values", str(len(values)), f"from {values[0]:.6g} to {values[-1]:.6g}"),
        ("smallest positive", f"{smallest:.6g}", f"zero up to {smallest / 2:.6g}"),
        ("largest gap", f"{gaps[widest]:.6g}", f"between {values[widest]:.6g} and {values[widest + 1]:.6g}"),
        ("gap below 1", f"{gaps[-1]:.6g}", f"from {values[-2]:.6g}"),
    ]
    printer.table(("", "", ""), facts, indent=2)
    printer.title("Values by decade; error: the largest, relative to the number that is rounded")
    printer.table(("from", "to", "above 0", "below 0", "gaps", "", "error"), list(_decades(values)))
    if codes:
        lines = range(0, len(values), _PER_LINE)
        rows = [(f"{first}", *(number(v) for v in values[first : first + _PER_LINE])) for first in lines]
        printer.title(f"All values, {_PER_LINE} a line from the code at its beginning")
        printer.table(("code", *(f"+{i}" for i in range(_PER_LINE))), rows)


def _decades(values: NDArray[np.float64]) -> Iterator[tuple[str, ...]]:
    """A row a decade, from one down to the smallest value: how many values, how far apart, how good.

    Between neighbors a and b the worst number is in the middle: the relative error there is (b - a) / (a + b).
    """
    positive = values[values >= 0]
    gaps, worst = np.diff(positive), np.diff(positive) / (positive[1:] + positive[:-1])
    top, floor = 1.0, float(positive[1])
    while True:
        # Edges as float32 numbers, as the values are: float32's 0.01 is a little less than the double's.
        low, high = np.float32(top / 10), np.float32(top) if top < 1 else np.inf
        inside, below = ((low <= x) & (x < high) for x in (positive, -values))
        here = np.flatnonzero(inside[1:])  # gaps that end at a value of this decade
        cells = [MISSING, "", MISSING]
        if len(here):
            least, most = f"{gaps[here].min():.2g}", f"{gaps[here].max():.2g}"
            cells = [least, "" if least == most else f"to {most}", f"{100 * worst[here].max():.3g} %"]
        yield f"{top / 10:g}", f"{top:g}", str(inside.sum()), str(below.sum()), *cells
        if low <= floor:
            return
        top = float(f"{top / 10:.0e}")


# Numbers as text.


def power(x: float) -> str:
    """A power of two as people write it: 2^-14, 1/8, 1024; any other number in nine digits."""
    mantissa, exponent = math.frexp(x)
    if mantissa != 0.5:
        return number(x)
    exponent -= 1
    if 0 <= exponent <= 16:
        return str(1 << exponent)
    return f"1/{1 << -exponent}" if -3 <= exponent < 0 else f"2^{exponent}"


def number(x: float, digits: int = 9) -> str:
    """A decimal of so many digits; nine tell any two numbers of float32 apart."""
    return f"{x:.{digits}g}"


def exact(x: float) -> str:
    """The shortest decimal that reads back as exactly this double."""
    return repr(x).removesuffix(".0")


def signed(error: Fraction | None) -> str:
    """An error in three digits, with its sign."""
    if error is None:
        return MISSING
    if not error:
        return "0"
    try:
        return f"{float(error):+.3g}"
    except OverflowError:
        return f"{Decimal(error.numerator) / Decimal(error.denominator):+.3g}"


# What a number becomes.


def read_value(text: str) -> float:
    """The double nearest to what was typed: a decimal, a hexadecimal float, inf, nan, or a power such as 2^-14."""
    typed = text.strip()
    try:
        if found := _POWER.fullmatch(typed):
            return math.copysign(math.ldexp(1.0, int(found[2])), -1.0 if found[1] == "-" else 1.0)
        return float.fromhex(typed) if "0x" in typed.lower() else float(typed)
    except (ValueError, OverflowError):
        wanted = "a number such as 0.1, 1e-8, 2^-14, 0x1p-3, inf or nan, of a double's range"
        raise UsageError(f"--value must be {wanted}, got {text!r}") from None


def _value_everywhere(printer: Printer, typed: str, x: float) -> None:
    """The number in every float format and in every codebook."""
    say_double(printer, typed, x)
    _show_codes(printer, x, [(fmt.name, fmt, fmt.encode(x)) for fmt in FORMATS])
    if not -1 <= x <= 1:
        printer.say(
            f"Codebooks: {typed} lies outside of [-1, 1], where their values are; "
            "a block is divided by its largest magnitude first."
        )
        return
    rows = []
    for name in codebook_names():
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
        rows.append(cells)
    printer.table(("codebook", "bits", "code", "signed", "error", "code", "unsigned", "error"), rows, gap=1)


def _value_in_float(printer: Printer, typed: str, x: float, fmt: FloatFormat) -> None:
    """The number in one format, with the two neighbors of what it becomes."""
    say_double(printer, typed, x)
    code = fmt.encode(x)
    named = (("below", neighbor(fmt, code, -1)), ("nearest", code), ("above", neighbor(fmt, code, 1)))
    printer.title(f"In {fmt.name}, with the neighbors of what it becomes")
    _show_codes(printer, x, [(name, fmt, to) for name, to in named if to is not None])


def _value_in_codebook(printer: Printer, typed: str, x: float, it: Shown) -> None:
    """The value nearest to x with its two neighbors."""
    low = -1 if it.signed else 0
    if not low <= x <= 1:
        raise UsageError(f"--value must be a number in [{low}, 1] for {it.title}, got {typed!r}")
    values = it.values
    code = encode(values, x)
    rows = []
    for name, index in (("below", code - 1), ("nearest", code), ("above", code + 1)):
        if 0 <= index < len(values):
            value = float(values[index])
            error = Fraction(value) - Fraction(x)
            rows.append((name, str(index), exact(value), signed(error), signed(error / Fraction(x) if x else None)))
    say_double(printer, typed, x)
    printer.title(f"In {it.title}, with its neighbors")
    printer.table(("", "code", "value", "error", "relative"), rows)


def neighbor(fmt: FloatFormat, code: int, by: int) -> int | None:
    """The code of the next number up (1) or down (-1), infinities included; None at the ends and for NaN."""
    sign = 1 << fmt.bits - 1
    place = code if code < sign else sign - code  # codes are sign and magnitude: minus zero is at zero too
    last = fmt.infinity_code if fmt.has_infinity else fmt.max_code
    place += by
    if abs(place) > last or math.isnan(fmt.decode(code)):
        return None
    return place if place >= 0 else sign - place


def _show_codes(printer: Printer, x: float, codes: list[tuple[str, FloatFormat, int]]) -> None:
    """Two tables, since one would be wider than a terminal: what a code means, and how far that is from x.

    Args:
        printer: where to.
        x: the number.
        codes: label, format and code of each row.
    """
    meanings, errors = [], []
    for label, fmt, code in codes:
        row, own = fmt.table()[code], fmt.encode(x)
        finite = math.isfinite(x) and math.isfinite(row.value)
        error = Fraction(row.value) - Fraction(x) if finite else None
        inside = math.isfinite(x) and not _overflows(fmt, x, fmt.decode(own))
        spacing = ulp(fmt, x) if inside else None
        relative = error / Fraction(x) if error is not None and x else None
        steps = error / Fraction(spacing) if error is not None and spacing else None
        note = _note(fmt, x, row.value) if code == own else ""
        meanings.append((label, hexadecimal(fmt, code), row.bits, exact(row.value)))
        shown_ulp = MISSING if spacing is None else power(spacing)
        errors.append((label, signed(error), signed(relative), signed(steps), shown_ulp, note))
    printer.table(("", "hex", "bits", "becomes"), meanings, left=("bits", "becomes"))
    printer.table(("", "error", "relative", "in ulps", "ulp", "outcome"), errors, left=("outcome",))


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
        return f"overflow: beyond {fmt.max:.6g}"
    if becomes == 0 != x:
        return f"underflow: 0 up to {power(fmt.min_subnormal / 2)}"
    kind = "exact" if becomes == x else "rounded"
    return kind if becomes == 0 or abs(becomes) >= fmt.min_normal else f"{kind}, subnormal"


def say_double(printer: Printer, typed: str, x: float) -> None:
    """Errors are those of the double that was read, so that is shown: in full, unless it has very many digits."""
    if not math.isfinite(x):
        printer.say(f"{typed} is read as {exact(x)}.")
        return
    decimal = Decimal(x)
    digits = next((d for d in (f"{decimal:f}", f"{decimal}") if len(d) <= _MOST_DIGITS), None)
    if digits is None:
        printer.say(f"{typed} is read as the double {x.hex()}, about {exact(x)}.")
    elif Decimal(exact(x)) == decimal:
        printer.say(f"{typed} is read as the double {digits}.")
    else:
        printer.say(f"{typed} is read as the double {x.hex()}, which is\n{digits}")
