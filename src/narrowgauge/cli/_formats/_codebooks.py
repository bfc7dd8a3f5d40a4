"""Pages on codebooks: the list, one codebook's values decade by decade, and what a number becomes in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge.cli._errors import UsageError
from narrowgauge.cli._printer import MISSING, Printer, brief, exact, number, say_double, signed
from narrowgauge.formats import CodebookMap, Coder, codebook, codebook_map, codebook_names

_PER_LINE = 4


class Shown(NamedTuple):
    """A codebook at a width, with or without sign."""

    map: CodebookMap
    signed: bool
    bits: int

    @property
    def values(self) -> Tensor:
        return codebook(self.map.name, self.signed, self.bits)

    @property
    def title(self) -> str:
        return f"{self.map.name}, {self.bits} bits, {'signed' if self.signed else 'unsigned'}"


def shown(found: CodebookMap, unsigned: bool, bits: int | None) -> Shown:
    """A codebook as asked for: with sign unless it has none, at its widest code where no width is given.

    Raises:
        UsageError: for a width or a sign that it is not defined for.
    """
    unsigned = unsigned or not found.signed_bits
    widths = found.unsigned_bits if unsigned else found.signed_bits
    if not widths:
        raise UsageError(f"--unsigned: takes a codebook that is defined without sign, {found.name} is not")
    if bits is not None and bits not in widths:
        takes = f"{span(widths)} for {found.name} {'without' if unsigned else 'with'} sign"
        raise UsageError(f"--bits: got {bits}, takes {takes}")
    return Shown(found, not unsigned, max(widths) if bits is None else bits)


def span(widths: Iterable[int]) -> str:
    """Code widths as 2-8."""
    found = sorted(widths)
    if not found:
        return MISSING
    return f"{found[0]}" if len(found) == 1 else f"{found[0]}-{found[-1]}"


def codebook_list(printer: Printer) -> None:
    """All codebooks: their sizes, and what they are."""
    rows, words = [], []
    for name in codebook_names():
        found = codebook_map(name)
        widths = (found.signed_bits, found.unsigned_bits)
        values = [
            codebook(name, sign, max(have)) if have else None
            for sign, have in zip((True, False), widths, strict=True)
        ]
        counts = [MISSING if v is None else str(len(v)) for v in values]
        least = [MISSING if v is None else f"{float(v[v > 0][0]):.2e}" for v in values]
        cells = zip(map(span, widths), counts, least, strict=True)
        rows.append((name, *chain.from_iterable(cells)))
        words.append((name, f"{found.summary} ({found.source})"))
    numbers = ("\nvalues", "smallest\n> 0")
    columns = ("\nCodebooks", "signed\nbits", *numbers, "unsigned\nbits", *numbers)
    printer.table(columns, rows)
    printer.table(("", ""), words)


def codebook_page(printer: Printer, it: Shown, *, codes: bool) -> None:
    """One codebook: what it is, its extent, its decades, and on demand its values."""
    values = it.values.to(torch.float64).numpy()
    printer.title(it.title)
    printer.say(f"{it.map.summary} ({it.map.source})")
    printer.table(("", "", ""), _facts(it, values), indent=2)
    printer.title("Values by decade; error: the largest, relative to the number that is rounded")
    columns = ("from", "to", "above 0", "below 0", "gaps", "", "error")
    printer.table(columns, list(_decades(values)))
    if codes:
        rows = [
            (f"{first}", *(number(v) for v in values[first : first + _PER_LINE]))
            for first in range(0, len(values), _PER_LINE)
        ]
        printer.title(f"All values, {_PER_LINE} a line from the code at its beginning")
        printer.table(("code", *[f"+{i}" for i in range(_PER_LINE)]), rows)


def inspect_in_codebook(printer: Printer, typed: str, x: float, it: Shown) -> None:
    """The value nearest to x with its two neighbours.

    Raises:
        UsageError: for a number outside of the codebook's interval.
    """
    low = -1 if it.signed else 0
    if not low <= x <= 1:
        raise UsageError(f"--value: got {typed!r}, takes a number in [{low}, 1] for {it.title}")
    values = it.values
    code = encode(values, x)
    rows = []
    for name, index in (("below", code - 1), ("nearest", code), ("above", code + 1)):
        if not 0 <= index < len(values):
            continue
        value = float(values[index])
        error = Fraction(value) - Fraction(x)
        relative = signed(error / Fraction(x)) if x else MISSING
        rows.append((name, str(index), exact(value), signed(error), relative))
    say_double(printer, typed, x)
    printer.title(f"In {it.title}, with its neighbours")
    printer.table(("", "code", "value", "error", "relative"), rows)


def encode(values: Tensor, x: float) -> int:
    """The code of the nearest value, as the library encodes: of x in float32."""
    return int(Coder.of(values).encode(torch.tensor(x, dtype=torch.float32)))


def _facts(it: Shown, values: NDArray[np.float64]) -> list[tuple[str, str, str]]:
    smallest = float(values[values > 0][0])
    gaps = np.diff(values)
    widest = int(gaps.argmax())
    between = f"between {brief(values[widest])} and {brief(values[widest + 1])}"
    spans = f"{span(it.map.signed_bits)} signed, {span(it.map.unsigned_bits)} unsigned"
    return [
        ("code bits", spans, ""),
        ("values", str(len(values)), f"from {brief(values[0])} to {brief(values[-1])}"),
        ("smallest positive", brief(smallest), f"zero up to {brief(smallest / 2)}"),
        ("largest gap", brief(gaps[widest]), between),
        ("gap below 1", brief(gaps[-1]), f"from {brief(values[-2])}"),
    ]


def _decades(values: NDArray[np.float64]) -> Iterator[tuple[str, ...]]:
    """A row a decade, from one down to the smallest value: how many values, how far apart, how good.

    Between neighbours a and b the worst number is in the middle: the relative error there is (b - a) / (a + b).
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
