"""Figure 3 of the 8-bit paper measured anew: loss against each hyperparameter, and 8-bit minus 32-bit below it."""

from __future__ import annotations

import statistics
from typing import Any

import _eight_bit_adam_plan as planned
from _eight_bit_adam_tables import NAMES, Runs, number
from matplotlib.figure import Figure

from narrowgauge.cli._plots import INK, MUTED, PALETTE

# Label, colour, dashes, marker, and how far to the side its dots are: those of two lines would cover one another.
LOOKS = (
    ("32-bit Adam", PALETTE["ink"][0], (), "o", -0.06),
    ("8-bit Adam", PALETTE["series-1"][0], (4, 2), "s", 0.06),
)


def sensitivity(results: dict[str, Any]) -> Figure:
    """Dots are runs, lines the mean over the seeds; a cross at the top is an unstable run."""
    runs = Runs(results)
    figure = Figure((12.5, 7.2), layout="constrained", facecolor="white")
    grid = figure.subplots(2, len(NAMES), sharex="col", sharey="row", height_ratios=(3, 2))
    for (top, bottom), name in zip(grid.T, NAMES, strict=True):
        rows = [row for row in planned.sensitivity(runs.lr) if row[0] == name]
        for place, (label, colour, dashes, marker, aside) in enumerate(LOOKS):
            means = []
            for x, row in enumerate(rows):
                losses = runs.losses(row[2 + place])
                means.append(statistics.fmean(losses) if losses else float("nan"))
                top.plot([x + aside] * len(losses), losses, marker, color=colour, markersize=5, alpha=0.8)
                if runs.unstable(row[2 + place]):
                    top.plot(x + aside, 0.97, "x", color=colour, transform=top.get_xaxis_transform())
            style = {"color": colour, "linewidth": 1.8, "linestyle": (0, dashes) if dashes else "-"}
            top.plot(range(len(rows)), means, label=label, **style)
        bottom.axhline(0.0, color=MUTED, linewidth=1.0)
        apart = [runs.differences(row[3], row[2]) for row in rows]
        for x, each in enumerate(apart):
            bottom.plot([x] * len(each), each, LOOKS[1][3], color=LOOKS[1][1], markersize=5, alpha=0.8)
        means = [statistics.fmean(each) if each else float("nan") for each in apart]
        bottom.plot(range(len(rows)), means, color=LOOKS[1][1], linewidth=1.8, linestyle=(0, LOOKS[1][2]))
        bottom.set_xticks(range(len(rows)), [number(row[1]) for row in rows])
        bottom.set_xlabel(NAMES[name])
    grid[0, 0].set_ylabel("validation loss", color=INK)
    grid[1, 0].set_ylabel("8-bit minus 32-bit", color=INK)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure
