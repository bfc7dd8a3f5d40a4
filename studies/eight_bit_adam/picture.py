"""Figure 3 of the 8-bit paper measured anew: loss against each hyperparameter, and 8-bit minus 32-bit below it."""

from __future__ import annotations

import statistics
from itertools import chain
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from narrowgauge.cli._charts import INK, MUTED, PALETTE
from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam.page import NAMES, TRAINING, VALIDATION, Runs, number

# Label, colour, dashes, marker, and how far to the side its dots are: those of two lines would cover one another.
LOOKS = (
    ("32-bit Adam", PALETTE["ink"][0], (), "o", -0.06),
    ("8-bit Adam", PALETTE["series-1"][0], (4, 2), "s", 0.06),
)
# The same of differences, by loss.
APART = (
    (VALIDATION, "difference, validation loss", PALETTE["series-3"][0], (6, 2), "D", 0.06),
    (TRAINING, "difference, training loss", PALETTE["series-2"][0], (2, 1.5), "^", -0.06),
)


def sensitivity(results: dict[str, Any]) -> Figure:
    """Dots are runs, lines the mean over the seeds; a cross at the top is an unstable run.

    The learning rate has an axis of its own, because its losses span much more.
    """
    runs = Runs(results)
    figure = Figure((12.5, 7.2), layout="constrained", facecolor="white")
    grid = figure.subplots(2, len(NAMES), sharex="col", height_ratios=(3, 2))
    for column, ((top, bottom), name) in enumerate(zip(grid.T, NAMES, strict=True)):
        rows = [row for row in planned.sensitivity(runs.lr) if row[0] == name]
        for place, look in enumerate(LOOKS):
            _line(top, [runs.losses(row[2 + place]) for row in rows], *look)
            for x, row in enumerate(rows):
                if runs.unstable(row[2 + place]):
                    top.plot(x + look[4], 0.97, "x", color=look[1], transform=top.get_xaxis_transform())
        bottom.axhline(0.0, color=MUTED, linewidth=1.0)
        for of, *look in APART:
            _line(bottom, [runs.differences(row[3], row[2], of) for row in rows], *look)
        bottom.set_xticks(range(len(rows)), [number(row[1]) for row in rows])
        bottom.set_xlabel(NAMES[name])
        if column:
            bottom.sharey(grid[1, 0])
            bottom.tick_params(labelleft=False)
        if column > 1:
            top.sharey(grid[0, 1])
            top.tick_params(labelleft=False)
    grid[0, 0].set_ylabel("validation loss", color=INK)
    grid[1, 0].set_ylabel("8-bit minus 32-bit", color=INK)
    labels = [axes.get_legend_handles_labels() for axes in grid[:, 0]]
    handles, names = (list(chain.from_iterable(each)) for each in zip(*labels, strict=True))
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _line(
    axes: Axes,
    found: list[list[float]],
    label: str,
    colour: str,
    dashes: tuple[float, ...],
    marker: str,
    aside: float,
) -> None:
    """Dots at each place, and a line through their means."""
    for x, each in enumerate(found):
        axes.plot([x + aside] * len(each), each, marker, color=colour, markersize=5, alpha=0.8)
    means = [statistics.fmean(each) if each else float("nan") for each in found]
    style = {"color": colour, "linewidth": 1.8, "linestyle": (0, dashes) if dashes else "-"}
    axes.plot(range(len(found)), means, label=label, **style)


PICTURES = {"": sensitivity}
