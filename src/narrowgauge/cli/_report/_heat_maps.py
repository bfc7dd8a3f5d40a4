"""The parts of which a run's figures are drawn: curves with what is not finite, heat maps, maps of codes.

Colors of a heat map cannot follow the page's scheme as lines do, because a browser paints them from an image.
So they are one hue whose opacity says how much: it stands out from light paper and from dark. What was measured and
is as it should be has a faint grey, what was not measured nothing, what was not finite a color of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from narrowgauge.cli._charts import (
    GRID,
    INK,
    MUTED,
    PALETTE,
    LineStyle,
    drawing,
    extremes,
    new_figure,
    printable,
    thin,
    to_svg,
)
from narrowgauge.cli._report._figure import Grid, short
from narrowgauge.gauges._history import Floats, Series

RAISED, LOWERED, BROKEN = (PALETTE[name][0] for name in ("series-2", "series-1", "series-4"))
# What is beyond this is drawn as what is not finite: sums and margins of an axis would overflow.
LARGEST = 1e30
# Opacity of what is as it should be.
CALM = 0.12
# What counts as being at a target, of the way from it to the end of its scale: a hundredth of EDQ.
NEAR = 0.02


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


def settle(axis: Any, title: str, last_step: int, label: bool = True) -> None:
    """Title and ticks of an axis over the steps."""
    axis.set_title(title, color=INK)
    if label:
        axis.set_xlabel("step")
    axis.set_xlim(0, max(last_step, 1) * 1.02)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axis.get_yscale() == "linear":
        axis.yaxis.set_major_locator(MaxNLocator(5))


def heat_map(name: str, title: str, cells: Grid, low: float, target: float, high: float) -> str:
    """Rows of tensors over steps: orange below the target and blue above, or orange where the target is the end."""
    count = len(cells.names)
    each = 15.0 if count <= 30 else max(450 / count, 1.6)
    with drawing():
        figure = new_figure(95 + each * count)
        axis, bar = figure.subplots(1, 2, width_ratios=(40, 1.6))
        _image(axis, _paint(cells.values, low, target, high, cells.broken))
        labels = short(cells.names)
        every = max(1, int(np.ceil(15.0 / each)))
        axis.set_yticks(range(0, count, every), [printable(label) for label in labels[::every]], fontsize=11)
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
        return to_svg(figure, name, title)


def table_map(name: str, title: str, rows: list[str], columns: list[str], values: Floats) -> str:
    """Rows of tensors over a few columns of shares, 0 to 1."""
    count = len(rows)
    each = 15.0 if count <= 30 else max(450 / count, 1.6)
    with drawing():
        figure = new_figure(110 + each * count)
        axis = figure.subplots()
        _image(axis, _paint(values, 0.0, 0.0, 1.0, None))
        every = max(1, int(np.ceil(15.0 / each)))
        axis.set_yticks(range(0, count, every), [printable(n) for n in short(rows)[::every]], fontsize=11)
        axis.set_xticks(range(len(columns)), columns, fontsize=11)
        axis.xaxis.tick_top()
        axis.set_title(title, color=INK)
        return to_svg(figure, name, title)


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
