"""A picture as its series: what each is called, its color, dashes and marker, and the panels they stand in.

Colors are after Okabe and Ito: safe for color-blind readers, and lines differ in dashes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE

__all__ = ["COLORS", "INK", "MUTED", "Line", "below", "figure", "numbers", "plain_numbers", "points", "ticks"]
COLORS = {name: light for name, (light, _) in PALETTE.items()}


@dataclass(frozen=True)
class Line:
    """A series of a picture."""

    label: str  # in the legend
    color: str  # of the palette, `series-1` to `series-6`, or `ink`
    dashes: tuple[float, ...] = ()  # on and off in line widths; none for a solid line
    width: float | None = 1.8  # of the line
    marker: str | None = None  # at its points; None for none

    def style(self, **more: Any) -> dict[str, Any]:
        """Arguments of `axis.plot`."""
        found: dict[str, Any] = {"color": COLORS[self.color]}
        found |= {} if self.width is None else {"linewidth": self.width}
        found |= {"linestyle": (0, self.dashes) if self.dashes else "-"}
        return found | ({"marker": self.marker} if self.marker else {}) | more


def figure(width: float, height: float, *grid: int, **more: Any) -> tuple[Figure, Any]:
    """A figure of some inches, and its panels: rows, columns, and further arguments of `subplots`."""
    made = Figure((width, height), layout="constrained", facecolor="white")
    return made, made.subplots(*grid, **more)


def below(made: Figure, axis: Any, columns: int, *more: tuple[Any, str], **others: Any) -> None:
    """The legend of a panel, below all panels, with further handles and their labels."""
    handles, labels = axis.get_legend_handles_labels()
    handles, labels = [*handles, *(h for h, _ in more)], [*labels, *(name for _, name in more)]
    made.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, **others)


def ticks(axis: Any, at: Sequence[float] | None, form: str | Callable[[float], str] = "g") -> None:
    """Ticks at some places, or where they are, with labels in a format; none between."""
    if at is not None:
        axis.set_major_locator(FixedLocator(at))
    shown = form if callable(form) else lambda value: format(value, form)
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axis.set_minor_locator(NullLocator())


def plain_numbers(axis: Any) -> None:
    """Labels of a logarithmic axis: 20, 50, 100; between them no label."""
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    ticks(axis, None, ",.6g")


def points(pairs: Iterable[tuple[float, float | None]]) -> tuple[list[float], list[float]]:
    """Places and values, without the places that have none."""
    kept = [(x, y) for x, y in pairs if y is not None]
    return [x for x, _ in kept], [y for _, y in kept]


def numbers(values: Iterable[float | None]) -> list[float]:
    """Values with NaN for what is none: a line with gaps."""
    return [math.nan if value is None else value for value in values]
