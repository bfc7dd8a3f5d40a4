"""How every chart is drawn: one palette in two schemes, line styles, thinned curves, and figures as SVG or files.

A figure for a page is drawn once, in the light palette. Every color of that palette then becomes a CSS variable
with the drawn color as its fallback, so that the page repaints it in the dark scheme and the figure also works
alone. Colors are after Okabe and Ito, safe for color-blind readers, and never the only sign: each line has its
own pair of color and dashes, the same in every figure.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# CSS variable: its color on light paper, its color on dark.
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

# Figures of pages are this many units wide: the type stays readable on a phone, where a unit is about 0.75 pixels.
WIDTH = 480
# A thinned curve has so many points; of a raw one, the extremes of so many stretches are drawn.
POINTS, STRETCHES = 240, 150

_RC = {
    "font.size": 14, "axes.titlesize": 14, "axes.labelsize": 13, "xtick.labelsize": 13, "ytick.labelsize": 13,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": GRID,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "xtick.major.size": 0, "ytick.major.size": 0,
    "lines.scale_dashes": False, "lines.solid_capstyle": "round",
    "svg.fonttype": "none", "svg.hashsalt": "narrowgauge", "text.parse_math": False,
}  # fmt: skip


@dataclass(frozen=True)
class LineStyle:
    """A variable of the palette, dashes in units (none: a solid line), and the width of a line."""

    variable: str
    dashes: tuple[float, ...]
    width: float

    @property
    def color(self) -> str:
        """The color on light paper."""
        return PALETTE[self.variable][0]

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of a matplotlib line."""
        return {
            "color": self.color,
            "linewidth": self.width,
            "linestyle": (0, self.dashes) if self.dashes else "-",
        }


def line_styles(names: Collection[str], reference: str | None = None) -> dict[str, LineStyle]:
    """The style of each name, no two alike for up to 24 names; that of the reference is apart from all others."""
    others = [name for name in names if name != reference]
    found = {
        name: LineStyle(SERIES[i % len(SERIES)], DASHES[(i + i // len(SERIES)) % len(DASHES)], 1.8)
        for i, name in enumerate(others)
    }
    return {name: found.get(name, LineStyle("ink", (), 2.2)) for name in names}


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings on top of matplotlib's own defaults, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has fonts for names that matplotlib's font cannot measure.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


@dataclass
class Drawn:
    """A figure of a page: its axes while it is drawn, then an `<svg>` element."""

    axes: Any
    svg: Markup = field(default_factory=Markup)


@contextmanager
def page_figure(name: str, title: str, height: float, *grid: int, **more: Any) -> Iterator[Drawn]:
    """A figure of a page, as wide as all; its `svg` is there after the block.

    Args:
        name: prefix of its ids, so that several figures share a page.
        title: what it shows, for those who cannot see it.
        height: in units.
        grid, more: arguments of matplotlib's `subplots`.
    """
    with drawing():
        figure = Figure((WIDTH / 72, height / 72), layout="constrained")
        made = Drawn(figure.subplots(*grid, **more))
        yield made
        made.svg = Markup(_to_svg(figure, name, title))


def printable(text: str) -> str:
    """The text without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() else "�" for c in text)


def save_figure(figure: Figure, path: Path, outlines: bool = False) -> bytes:
    """The content of a picture's file.

    Args:
        figure: to draw.
        path: its suffix says of which kind.
        outlines: in an SVG, letters are drawn as outlines, for machines with other fonts; else text stays text.
    """
    kind = path.suffix.lower()[1:]
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    file = io.BytesIO()
    with drawing():
        matplotlib.rcParams["svg.fonttype"] = "path" if outlines else "none"
        figure.savefig(file, format=kind, dpi=130, bbox_inches="tight", pad_inches=0.15, metadata=dated)
    return file.getvalue()


def bar_panels(panels: Mapping[str, Mapping[str, float | None]], title: str) -> Figure:
    """Horizontal bars, a panel above the other, each on its own scale; None draws no bar.

    Args:
        panels: by the panel's title, values by the bars' names.
        title: what the values are.
    """
    counts = [max(len(values), 1) for values in panels.values()]
    with drawing():
        figure = Figure((10.0, sum(0.28 * n + 1.1 for n in counts)), layout="constrained", facecolor="white")
        axes = figure.subplots(len(counts), 1, squeeze=False, height_ratios=counts)[:, 0]
        for axis, (name, values) in zip(axes, panels.items(), strict=True):
            known = [value or 0.0 for value in values.values()]
            axis.barh(range(len(known)), known, 0.7, color=PALETTE["series-2"][0])
            axis.set_yticks(range(len(known)), [printable(bar) for bar in values], fontsize=11, color=INK)
            axis.set(xlim=(0, 1.12 * (max(known, default=0.0) or 1.0)), ylim=(len(known) - 0.4, -0.6), xlabel=title)
            axis.set_title(printable(name))
            axis.grid(False, axis="y")
            for row, value in enumerate(values.values()):
                text = "not measured" if value is None else f"{value:,.3g}"
                axis.annotate(text, (known[row], row), (5, 0), textcoords="offset points", va="center", fontsize=11)
    return figure


def _to_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an `<svg>` element as wide as its place, with the palette's colors as CSS variables."""
    file = io.StringIO()
    unwanted = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=unwanted)
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # A <style> inside an inline SVG would apply to the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): _repainted(_local(key), text, name) for key, text in element.attrib.items()}
    box = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": root.attrib["viewBox"],
        "style": "stroke-linejoin: round",
    }
    root.attrib = {**box, "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _repainted(attribute: str, text: str, name: str) -> str:
    if attribute == "id":
        return f"{name}-{text}"
    if attribute == "d":
        return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}", text).replace("\n", "")
    if attribute == "style":
        text = re.sub("#[0-9a-f]{6}", lambda c: _VARIABLES.get(c[0], c[0]), text)
    return re.sub(r"^#|(?<=url\()#", f"#{name}-", text)


def thin(count: int, most: int = POINTS) -> NDArray[np.intp]:
    """Indices of at most `most` of `count` points, evenly spread, both ends among them."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(np.intp))


def extremes(values: Floats) -> NDArray[np.intp]:
    """Indices of the lowest and highest value in each of STRETCHES stretches; all where there are few."""
    if len(values) <= 2 * STRETCHES:
        return np.arange(len(values))
    stretches = np.array_split(np.arange(len(values)), STRETCHES)
    return np.unique([s[pick(values[s])] for s in stretches for pick in (np.argmin, np.argmax)])
