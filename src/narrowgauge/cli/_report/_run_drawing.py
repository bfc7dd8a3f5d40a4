"""What a run's figures are drawn with: curves, heat maps, maps of codes; all thinned to what a page has room for.

A run of 100 000 steps has more of everything than a page has points. A curve keeps the lowest and the highest value
of each stretch, a cell of a heat map the worst of what falls into it. What is thinned says so under its figure.

Colors of a heat map cannot follow the page's scheme as lines do, because a browser paints them from an image.
So they are one hue whose opacity says how much: it stands out from light paper and from dark. What was measured and
is as it should be has a faint grey, what was not measured nothing, what was not finite a color of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from narrowgauge.cli._charts import (
    GRID,
    INK,
    MUTED,
    PALETTE,
    LineStyle,
    extremes,
    page_figure,
    printable,
    thin,
)
from narrowgauge.gauges._history import Floats, History, Series

RAISED, LOWERED, BROKEN = (PALETTE[name][0] for name in ("series-2", "series-1", "series-4"))
# What is beyond this is drawn as what is not finite: sums and margins of an axis would overflow.
LARGEST = 1e30
# Opacity of what is as it should be.
CALM = 0.12
# What counts as being at a target, of the way from it to the end of its scale: a hundredth of EDQ.
NEAR = 0.02
# What a heat map shows at most, in rows and columns; beyond, neighbors share a cell.
ROWS, COLUMNS = 320, 160
# Longest label of a row, in characters.
LABEL = 26
# Units of height of a row that has room for a label.
LABELED = 15.0


@dataclass(frozen=True)
class Grid:
    """A number of many tensors over the steps, thinned.

    Attributes:
        names: the tensor, or the first and the last of several, of each row.
        steps: the first step of each column, and last of all the end.
        values: (rows, columns), the worst of each cell; NaN where nothing was measured.
        broken: (rows, columns), where something measured was not finite.
        shared: how many steps and tensors share a cell at most.
    """

    names: list[str]
    steps: NDArray[np.int64]
    values: Floats
    broken: NDArray[np.bool_]
    shared: tuple[int, int]


def grid(history: History, kind: str, field: str, target: float) -> Grid | None:
    """A number of every tensor of a kind; the worst is what is farthest from the target. None if there is none."""
    names, steps, values = history.matrix(kind, field)
    if not names:
        return None
    measured = np.zeros(values.shape, bool)
    for row, name in zip(measured, names, strict=True):
        row[np.searchsorted(steps, history.series(kind, field, name).steps)] = True
    broken = measured & ~np.isfinite(values)
    rows = np.array_split(np.arange(len(names)), min(len(names), ROWS))
    columns = np.array_split(np.arange(len(steps)), min(len(steps), COLUMNS))
    thin = np.full((len(rows), len(columns)), np.nan)
    marks = np.zeros(thin.shape, bool)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            cell = values[np.ix_(row, column)]
            finite = cell[np.isfinite(cell)]
            if len(finite):
                thin[i, j] = finite[np.argmax(np.abs(finite - target))]
            marks[i, j] = broken[np.ix_(row, column)].any()
    ends = [names[row[0]] if len(row) == 1 else f"{names[row[0]]} … {names[row[-1]]}" for row in rows]
    shared = (max(map(len, columns)), max(map(len, rows)))
    return Grid(ends, np.append([steps[c[0]] for c in columns], steps[-1]), thin, marks, shared)


def short(names: Sequence[str]) -> list[str]:
    """Names as labels: without the parts that all have in front, the end of what is still too long."""
    return [label if len(label) <= LABEL else "…" + label[1 - LABEL :] for label in without_common(names)]


def without_common(names: Sequence[str]) -> list[str]:
    """Names without the parts that all have in front."""
    parts = [name.split(".") for name in names]
    common = 0
    while len(names) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return [".".join(p[common:]) for p in parts]


def curve(axis: Any, series: Series, look: LineStyle, smoothed: bool = False) -> None:
    """A line as measured, thinned so that no spike goes; with a smoothed one above it if wanted.

    What is not finite, or too large to be drawn, is a cross at the top of the axis; the line passes over it.
    """
    series = Series(series.steps, drawable(series.values))
    finite = series.finite
    if len(finite.steps):
        few = extremes(finite.values)
        if smoothed and len(finite.steps) > 40:
            axis.plot(finite.steps[few], finite.values[few], color=look.color, linewidth=0.7, alpha=0.35)
            kept = thin(len(finite.steps))
            axis.plot(finite.steps[kept], medians(finite.values, kept), **look.line, zorder=3)
        else:
            dot = "o" if len(few) == 1 else None
            axis.plot(finite.steps[few], finite.values[few], **look.line, marker=dot, zorder=3)
    broken = series.steps[~np.isfinite(series.values)]
    if len(broken):
        broken = broken[thin(len(broken), 40)]
        across = axis.get_xaxis_transform()
        axis.plot(broken, [0.97] * len(broken), "x", color=BROKEN, transform=across, clip_on=False, zorder=4)


def medians(values: Floats, at: NDArray[np.intp]) -> Floats:
    """The median of a window of about a twentieth of the values, centered at some of them, smaller at both ends.

    A mean would rise before a spike, as if something had announced it.
    """
    last, half = len(values) - 1, len(values) // 40
    reach = np.minimum(np.minimum(at, last - at), half)
    return np.array([np.median(values[i - r : i + r + 1]) for i, r in zip(at, reach, strict=True)])


def drawable(values: Floats, positive: bool = False) -> Floats:
    """NaN in place of what no axis has room for: beyond 1e30, and where only positive values go, below 1e-30."""
    with np.errstate(invalid="ignore"):
        kept = np.abs(values) <= LARGEST
        if positive:
            kept &= values >= 1 / LARGEST
    return np.where(kept, values, np.nan)


def logarithmic(axis: Any, base: int = 10) -> None:
    """A logarithmic y axis whose ticks are plain numbers: pages have no place for mathematical type."""
    axis.set_yscale("log", base=base)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def settle(axis: Any, title: str, last_step: int, label: bool = True, room: float = 0.0) -> None:
    """Title and ticks of an axis over the steps, and a range in which rounding errors are no curves.

    A hundredth of the values' size is above and below them, at least `room`. If none is negative, the range begins
    at zero or above.
    """
    axis.set_title(title, color=INK)
    if label:
        axis.set_xlabel("step")
    axis.set_xlim(0, max(last_step, 1) * 1.02)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axis.get_yscale() == "linear":
        axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.ticklabel_format(axis="y", useOffset=False)
        low, high = axis.dataLim.intervaly
        if low <= high:  # there are values
            bottom, top = axis.get_ylim()
            room = max(room, abs(high) / 100)
            bottom, top = min(bottom, low - room), max(top, high + room)
            axis.set_ylim(max(bottom, 0.0) if low >= 0 else bottom, top)


def heat_map(name: str, title: str, cells: Grid, low: float, target: float, high: float) -> Markup:
    """Rows of tensors over steps: orange below the target and blue above, or orange where the target is the end."""
    with page_figure(name, title, 95 + _height(cells.names), 1, 2, width_ratios=(40, 1.6)) as drawn:
        axis, bar = drawn.axes
        _image(axis, _paint(cells.values, low, target, high, cells.broken))
        _label_rows(axis, cells.names)
        steps = len(cells.steps) - 1
        ticks = np.unique(np.linspace(0, steps - 1, min(steps, 4)).round().astype(int))
        axis.set_xticks(ticks, [f"{int(cells.steps[i]):,}" for i in ticks])
        axis.set_xlabel("step")
        axis.set_title(title, color=INK)
        scale = np.linspace(high, low, 64)[:, None]
        bar.grid(False)
        bar.imshow(_paint(scale, low, target, high, None), aspect="auto", interpolation="none",
                   extent=(0, 1, low, high))  # fmt: skip
        bar.yaxis.tick_right()
        bar.set_xticks([])
        bar.yaxis.set_major_locator(MaxNLocator(4))
    return drawn.svg


def table_map(name: str, title: str, rows: list[str], columns: list[str], values: Floats) -> Markup:
    """Rows of tensors over a few columns of shares, 0 to 1."""
    with page_figure(name, title, 110 + _height(rows)) as drawn:
        axis = drawn.axes
        _image(axis, _paint(values, 0.0, 0.0, 1.0, None))
        _label_rows(axis, rows)
        axis.set_xticks(range(len(columns)), columns, fontsize=11)
        axis.xaxis.tick_top()
        axis.set_title(title, color=INK)
    return drawn.svg


def _height(rows: Sequence[str]) -> float:
    """Of all rows of a map, in units."""
    return len(rows) * _row_height(len(rows))


def _row_height(count: int) -> float:
    return LABELED if count <= 30 else max(450 / count, 1.6)


def _label_rows(axis: Any, rows: Sequence[str]) -> None:
    """A label for each row, or for as many as there is room for."""
    every = max(1, int(np.ceil(LABELED / _row_height(len(rows)))))
    labels = [printable(label) for label in short(rows)[::every]]
    axis.set_yticks(range(0, len(rows), every), labels, fontsize=11)


def code_map(axis: Any, values: Floats, title: str) -> None:
    """A 256 × 256 map on a logarithmic scale, five decades below its largest value; nothing where a cell is 0."""
    largest = float(np.nanmax(np.where(np.isfinite(values), values, 0.0))) if values.size else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = 1 + np.log10(values / largest) / 5
    shown = np.where(values > 0, np.clip(depth, 0.08, 1.0), np.nan)
    _image(axis, _paint(shown, 0.0, 0.0, 1.0, None, calm=0.0))
    axis.set_aspect("equal")
    axis.set_title(title, color=INK)
    axis.set_xlabel("code of v")
    axis.set_xticks([0, 128, 255])
    axis.set_yticks([0, 128, 255])
    for spine in axis.spines.values():
        spine.set(visible=True, color=GRID)


def _image(axis: Any, colors: NDArray[np.uint8]) -> None:
    axis.grid(False)
    axis.imshow(colors, aspect="auto", interpolation="none")


def _paint(
    values: Floats, low: float, target: float, high: float, broken: NDArray[np.bool_] | None, calm: float = CALM
) -> NDArray[np.uint8]:
    """Bytes (rows, columns, 4): the hue by the side of the target, the opacity by the distance from it."""
    near = np.clip(values, low, high)
    above = (near - target) / (high - target) if high > target else np.zeros_like(near)
    below = (target - near) / (target - low) if target > low else np.zeros_like(near)
    known = np.isfinite(values)
    share = np.where(known, np.maximum(above, below), 0.0)
    if low < target < high:  # rounding in fp32 has two sides as well, and is nothing to look at
        share[share < NEAR] = 0.0
    # With nothing below the target there is one direction, and it is the bad one.
    raised = LOWERED if low >= target else RAISED
    grey = np.array(to_rgb(MUTED))
    hue = np.where((above > 0)[..., None], np.array(to_rgb(raised)), np.array(to_rgb(LOWERED)))
    colors = np.zeros((*values.shape, 4))
    colors[..., :3] = np.where((share > 0)[..., None], hue, grey)
    colors[..., 3] = np.where(known, np.where(share > 0, calm + (1 - calm) * share, calm), 0.0)
    if broken is not None:
        colors[broken] = (*to_rgb(BROKEN), 1.0)
    # Sixteen levels of opacity: an eye tells no more apart, and images pack better.
    colors[..., 3] = np.round(colors[..., 3] * 15) / 15
    return np.asarray((colors * 255).round(), np.uint8)
