"""Numbers and tables as text: powers of two as such, nothing cut off at 80 columns."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

MISSING = "-"

# Doubles with longer expansions are shown in hexadecimal alone.
_MOST_DIGITS = 72


class Printer:
    """Paragraphs and tables, a blank line between them."""

    def __init__(self) -> None:
        # A pipe or a log has no width of its own; what is printed is made for 80 columns.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
        self._console = Console(width=width, highlight=False, markup=False, emoji=False)
        self._begun = False

    def say(self, text: str, style: str | None = None) -> None:
        """A paragraph; lines are folded between words, and long words stay whole."""
        if self._begun:
            self._console.print()
        self._console.print(text, style=style)
        self._begun = True

    def line(self, text: str) -> None:
        """A line that is not folded, such as a path to copy."""
        self._console.print(text, soft_wrap=True)

    def title(self, text: str) -> None:
        """A heading: the table or paragraph after it follows directly."""
        self.say(text, style="bold")
        self._begun = False

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        left: Sequence[str] = (),
        gap: int = 2,
        indent: int = 0,
    ) -> None:
        """A table without lines.

        Args:
            columns: their headings; with none at all the table has no heading.
            rows: their cells.
            left: headings of columns to align left; the first is in any case, the others hold numbers.
            gap: spaces between columns.
            indent: spaces before the first.
        """
        if self._begun:
            self._console.print()
        table = Table(
            box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0), show_header=any(columns)
        )
        for index, name in enumerate(columns):
            text = index == 0 or name in left or not any(columns)
            table.add_column(name, justify="left" if text else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(Padding(table, (0, 0, 0, indent), expand=False))
        self._begun = True


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
