"""The picture of bytes against loss: a point a row, its seeds as a bar, the spread of the reference as a band.

The scale of the losses is linear within the band and logarithmic beyond, so that a row a thousandth off and one a
whole nat off are both to be seen. Labels are put where there is room, by trying places around their point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from narrowgauge.cli._charts import INK, MUTED, PALETTE
from studies.bytes_and_loss.page import REFERENCE, Found, Results, found, spread

# Family: its colour and marker. New storages stand out, whatever their weights.
LOOKS = {
    "logarithmic states": ("series-1", "o"),
    "this library's other recipes": ("series-2", "s"),
    "bitsandbytes": ("series-3", "^"),
    "torchao": ("series-4", "v"),
    "flashoptim": ("series-5", "D"),
    "optimi": ("series-6", "P"),
}
TICKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
RADII = (9, 15, 22, 30, 40, 52, 66, 82)  # points from a marker to its label, the nearest that is free
ANGLES = (0, 180, 90, 270, 30, 330, 150, 210, 60, 300, 120, 240)


def look(row: Found) -> str:
    """The family that a row is drawn as."""
    if row.family != "ours":
        return row.family
    return "logarithmic states" if "log" in row.name else "this library's other recipes"


def bytes_against_loss(results: Results, setting: int = 0) -> Figure:
    """Bytes a parameter against the mean difference from the reference."""
    rows = [row for row in found(results, setting) if row.mean is not None]
    band = spread(results, setting) or 0.003
    figure = Figure((12.5, 8.2), layout="constrained", facecolor="white")
    axis = figure.subplots()
    axis.axhspan(-band, band, color=MUTED, alpha=0.16, linewidth=0, label=f"spread of {REFERENCE} over the seeds")
    axis.axhline(0, color=MUTED, linewidth=1)
    named = set()
    for row in rows:
        family = look(row)
        variable, marker = LOOKS[family]
        colour = INK if row.name == REFERENCE else PALETTE[variable][0]
        axis.plot(
            [row.bytes] * 2, [min(row.differences), max(row.differences)], color=colour, linewidth=1.6, alpha=0.7
        )
        label = family if family not in named and row.name != REFERENCE else None
        axis.plot([row.bytes], [row.mean], marker, color=colour, markersize=8, label=label, linestyle="none")
        named |= {family} if label else set()
    _scale(axis, rows, band)
    axis.set_xlabel("bytes a parameter: weight, gradient, and what the optimizer keeps")
    axis.set_ylabel(f"validation loss − that of {REFERENCE}, nats a token")
    above = axis.secondary_xaxis("top", functions=(lambda x: x - 2, lambda x: x + 2))
    above.set_xlabel("with each bf16 gradient freed at once", color=MUTED)
    above.spines["top"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, handletextpad=0.3)
    _labels(figure, axis, rows)
    return figure


def _scale(axis: Any, rows: Sequence[Found], band: float) -> None:
    axis.set_yscale("symlog", linthresh=band, linscale=0.9)
    lowest, highest = (f([x for row in rows for x in row.differences]) for f in (min, max))
    axis.set_ylim(min(-2 * band, 1.6 * lowest), max(2 * band, 1.6 * highest))
    low, high = axis.get_ylim()
    ticks = [0.0, *(s * t for t in TICKS for s in (1, -1) if t > 0.7 * band and low <= s * t <= high)]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}".replace("-", "−") if y else "0"))
    most = max(row.bytes or 0 for row in rows)
    least = min(row.bytes or 0 for row in rows)
    axis.set_xlim(least - 0.6, most + 0.9)
    axis.xaxis.set_major_locator(FixedLocator(range(int(least), int(most) + 2)))


def _labels(figure: Figure, axis: Any, rows: Sequence[Found]) -> None:
    """Names beside the points, none on another, on a point or outside: the free place nearest to its point."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    unit = figure.dpi / 72
    inside = axis.get_window_extent(renderer)
    places = [axis.transData.transform((row.bytes, row.mean)) for row in rows]
    taken = [Bbox.from_bounds(x - 5 * unit, y - 5 * unit, 10 * unit, 10 * unit) for x, y in places]
    for row, place in sorted(zip(rows, places, strict=True), key=lambda pair: pair[0].name):
        text = axis.annotate(row.name, place, xycoords="figure pixels", fontsize=11, color=INK)
        size = text.get_window_extent(renderer)
        box, shift = _free(place, (size.width, size.height), taken, inside, unit)
        text.remove()
        taken.append(box)
        far = np.hypot(*shift) > 26
        axis.annotate(
            row.name, (row.bytes, row.mean), shift, textcoords="offset points", fontsize=11, color=INK,
            ha="left" if shift[0] >= 0 else "right", va="center",
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 4} if far else None,
        ).set_in_layout(False)  # fmt: skip


def _free(
    place: Any, size: tuple[float, float], taken: Sequence[Bbox], inside: Bbox, unit: float
) -> tuple[Bbox, tuple[float, float]]:
    """A box for a label of this size in pixels, and its offset from the point in points."""
    width, height = size
    choices = []
    for radius in RADII:
        for angle in ANGLES:
            dx, dy = radius * np.cos(np.radians(angle)), radius * np.sin(np.radians(angle))
            dx = 0.0 if abs(dx) < 1e-9 else dx
            left = place[0] + dx * unit - (0 if dx >= 0 else width)
            box = Bbox.from_bounds(left - 2, place[1] + dy * unit - height / 2 - 1, width + 4, height + 2)
            outside = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
            hit = sum(1 for other in taken if box.overlaps(other)) + 10 * outside
            if not hit:
                return box, (float(dx), float(dy))
            choices.append((hit, radius, box, (float(dx), float(dy))))
    _, _, box, shift = min(choices, key=lambda choice: choice[:2])
    return box, shift


PICTURES = {"": bytes_against_loss}
