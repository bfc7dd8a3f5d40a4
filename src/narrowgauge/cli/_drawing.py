"""What the figures of all reports share: a palette in two schemes, how lines look, and figures as SVG.

A figure is drawn once in the light palette. Every colour of that palette then becomes a CSS variable with the
drawn colour as its fallback, so that the page repaints it for the dark scheme and the file still works alone.
Colours are after Okabe and Ito, safe for colour-blind readers, and never the only sign: each recipe has its own
pair of colour and dashes, the same in every figure, and the reference is the solid line in the colour of the text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ._svg import svg

# CSS variable: its colour on light paper, its colour on dark.
PALETTE = {
    "ink": ("#1d2329", "#e8ebee"),
    "muted": ("#5c6670", "#a3adb7"),
    "grid": ("#dde2e7", "#333b44"),
    "series-1": ("#d55e00", "#ff8f4a"),
    "series-2": ("#0072b2", "#58aef0"),
    "series-3": ("#009e73", "#3fd0a3"),
    "series-4": ("#b5508f", "#e89fcd"),
    "series-5": ("#c48a00", "#f2c450"),
    "series-6": ("#46a3dc", "#b5e0ff"),
}
INK, MUTED, GRID = (PALETTE[name][0] for name in ("ink", "muted", "grid"))
SERIES = [name for name in PALETTE if name.startswith("series")]
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 1.5), (8, 2, 1.5, 2))
_VARIABLES = {light: f"var(--{name}, {light})" for name, (light, _) in PALETTE.items()}

# Figures are this many units wide: the type stays readable on a phone, where a unit is about 0.75 pixels.
WIDTH = 480

_RC = {
    "font.size": 14, "axes.titlesize": 14, "axes.labelsize": 13, "xtick.labelsize": 13, "ytick.labelsize": 13,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": GRID,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "xtick.major.size": 0, "ytick.major.size": 0,
    "lines.scale_dashes": False, "lines.solid_capstyle": "round",
    "svg.fonttype": "none", "svg.hashsalt": "narrowgauge", "text.parse_math": False,
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How a recipe is drawn: a variable of the palette, its light colour, dashes in units (none: a solid line)."""

    variable: str
    dashes: tuple[float, ...]
    width: float

    @property
    def colour(self) -> str:
        return PALETTE[self.variable][0]

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of a matplotlib line."""
        return {
            "color": self.colour,
            "linewidth": self.width,
            "linestyle": (0, self.dashes) if self.dashes else "-",
        }


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings on top of matplotlib's own, whatever the user's matplotlibrc says, and as they were after."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has fonts for names that matplotlib's font cannot measure.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(height: float) -> Figure:
    return Figure((WIDTH / 72, height / 72), layout="constrained")


def printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() else "�" for c in text)


def to_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an element of a page: see `svg`; its colours are the palette's variables."""
    return svg(figure, name, title, _VARIABLES)
