"""Pages on float formats: the list, one format's fields, range, notable codes and resolution.

Source: Lecture 11, Mixed Precision Training ("Float 16 (FP16)"; "The resolution in each period").
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise

import torch

from narrowgauge.cli._formats._codebooks import codebook_list
from narrowgauge.cli._formats._names import FORMATS
from narrowgauge.cli._printer import Printer, number, power
from narrowgauge.formats import Binade, FloatFormat, codebook_names
from narrowgauge.formats import NotableRow as Notable

# A page shows this many binades in full; of more than these, the ends and those around one.
_MOST_BINADES = 48
_ENDS, _AROUND_ONE = 3, 5


def listing(printer: Printer) -> None:
    """All float formats and all codebooks."""
    rows = [
        (
            fmt.name,
            f"1+{fmt.exponent_bits}+{fmt.mantissa_bits}",
            f"{fmt.max:.6g}",
            power(fmt.min_normal),
            power(fmt.min_subnormal),
            power(ulp(fmt, 1.0)),
            _top_exponent(fmt),
        )
        for fmt in FORMATS
    ]
    columns = (
        "\nFloat formats", "bits\ns+e+f", "\nlargest", "smallest\nnormal", "smallest\nsubnormal", "\nulp(1)",
        "top exponent\nmeans",
    )  # fmt: skip
    printer.table(columns, rows, left=("bits\ns+e+f", "top exponent\nmeans"))
    codebook_list(printer)
    printer.say(
        "narrowgauge formats NAME shows one, or a float layout of your own such as e3m4. "
        "--value 0.1 shows what a number becomes in each. --plot draws."
    )


def float_page(printer: Printer, fmt: FloatFormat, *, every_binade: bool) -> None:
    """One format, from its fields to its spacings."""
    printer.title(f"{fmt.name}: {fmt.bits} bits" + (f", {fmt.dtype}" if fmt.dtype is not None else ""))
    e, f = "e" * fmt.exponent_bits, "f" * fmt.mantissa_bits
    printer.say(f"  s | {e} | {f}")
    printer.table(("", "", ""), _translation(fmt), indent=2)
    printer.title("Range")
    printer.table(("", "", ""), _range(fmt), indent=2)
    columns = ("Notable codes", "hex", "", "value", "note")
    printer.table(columns, _notable(fmt), left=("", "hex", "value", "note"), gap=1)
    rows, elided = _binades(fmt, every_binade)
    printer.title("Resolution: from min to max, neighbours are one interval apart")
    printer.table(("min", "max", "interval", "", "numbers"), rows)
    if elided:
        printer.say(f"{elided} binades are left out; --all shows them.")
    if fmt.name in codebook_names():
        printer.say(f"As a codebook, over its largest: narrowgauge formats {fmt.name} --codebook")


def all_codes(printer: Printer, fmt: FloatFormat) -> None:
    """Every code from zero up, a line for those that share all bits but the last two."""
    low = min(fmt.mantissa_bits, 2)
    table = fmt.table()
    rows = []
    for first in range(0, 1 << fmt.bits - 1, 1 << low):
        bits = table[first].bits
        values = [number(table[code].value) for code in range(first, first + (1 << low))]
        rows.append((hexadecimal(fmt, first), bits[: len(bits) - low].rstrip(), *values))
    printer.title(f"All codes from zero up; the negative numbers have {1 << fmt.bits - 1:#x} more")
    columns = [f"..{last:0{low}b}" for last in range(1 << low)]
    printer.table(("hex", "bits", *columns), rows, left=("bits",))


def ulp(fmt: FloatFormat, x: float) -> float:
    """The spacing of the format at a number."""
    return float(fmt.ulp(torch.tensor(x, dtype=torch.float64)))


def hexadecimal(fmt: FloatFormat, code: int) -> str:
    """A code in as many hexadecimal digits as the format needs."""
    return f"{code:0{(fmt.bits + 3) // 4}x}"


def _top_exponent(fmt: FloatFormat) -> str:
    if fmt.has_infinity:
        return "inf, NaN"
    return "numbers, 1 NaN" if fmt.has_nan else "numbers"


def _translation(fmt: FloatFormat) -> list[tuple[str, str, str]]:
    """What s, e and f mean: subnormal numbers, normal ones, and the specials."""
    steps = f"2^{fmt.mantissa_bits}" if fmt.mantissa_bits > 16 else str(1 << fmt.mantissa_bits)
    top = (1 << fmt.exponent_bits) - 1
    last = top - 1 if fmt.has_infinity else top
    rows = [
        ("e = 0", f"(-1)^s * 2^{fmt.min_exponent} * f/{steps}", "zero and subnormal numbers"),
        (f"e = 1 to {last}", f"(-1)^s * 2^(e - {fmt.bias}) * (1 + f/{steps})", "normal numbers"),
    ]
    if fmt.has_infinity:
        rows.append((f"e = {top}", "infinity if f = 0, else NaN", ""))
    elif fmt.has_nan:
        rows.append((f"e = {top}", f"NaN if f = {(1 << fmt.mantissa_bits) - 1}, no infinity", ""))
    return rows


def _range(fmt: FloatFormat) -> list[tuple[str, str, str]]:
    """The ends of the format, and what falls off at each."""
    one = ulp(fmt, 1.0)
    return [
        ("largest", number(fmt.max), _beyond(fmt)),
        ("smallest normal", _both(fmt.min_normal), ""),
        ("smallest subnormal", _both(fmt.min_subnormal), f"zero up to {power(fmt.min_subnormal / 2)}"),
        ("ulp(1)", _both(one), f"1 + x = 1 for x up to {power(one / 2)}"),
        ("finite numbers", str(2 * fmt.max_code + 1), "counting zero once"),
    ]


def _beyond(fmt: FloatFormat) -> str:
    """What overflow is: halfway from the largest number to where the next would be, or right above the largest."""
    if not fmt.has_infinity:
        return f"{number(fmt.max)} for all above it"
    return f"infinity from {number(fmt.max + ulp(fmt, fmt.max) / 2)}"


def _both(x: float) -> str:
    return power(x) if power(x) == number(x) else f"{power(x)} = {number(x)}"


def _notable(fmt: FloatFormat) -> list[tuple[str, str, str, str, str]]:
    """The lecture's table; what narrow formats have in one code stands in one row."""
    digits = 9 if fmt.mantissa_bits <= 23 else 11
    rows = []
    for code, group in groupby(sorted(fmt.notable(), key=_code), key=_code):
        same = list(group)
        row = same[0].row
        value = {math.inf: "infinity"}.get(row.value, number(row.value, digits)).replace("nan", "NaN")
        rows.append((row.bits, hexadecimal(fmt, code), _formula(fmt, code), value, ", ".join(n.note for n in same)))
    return rows


def _code(notable: Notable) -> int:
    return notable.row.code


def _formula(fmt: FloatFormat, code: int) -> str:
    """2^e (1 + f/2^m) of a positive finite code, where its bits leave room for it."""
    field, fraction = divmod(code, 1 << fmt.mantissa_bits)
    if not 0 < code <= fmt.max_code or fmt.bits > 16:
        return ""
    exponent = max(field, 1) - fmt.bias
    return f"2^{exponent} ({1 if field else 0} + {fraction}/{1 << fmt.mantissa_bits})"


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
        rows.append(_binade(binades[index]))
    return rows, len(binades) - len(kept)


def _binade(binade: Binade) -> tuple[str, ...]:
    low, high = power(binade.low), power(binade.high) if binade.high < math.inf else "2^1024"
    spacing = power(binade.spacing)
    decimal = "" if spacing == number(binade.spacing) else f"{binade.spacing:.3g}"
    return low, high, spacing, decimal, str(binade.numbers)
