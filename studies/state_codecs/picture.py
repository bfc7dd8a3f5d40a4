"""Error against steps for some state codecs, a panel a case."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from narrowgauge.cli._charts import INK, PALETTE
from studies.state_codecs.page import LABELS

# Colour, dashes and width of each candidate that is shown; the rest are in the tables.
LOOKS: dict[str, tuple[str, str, tuple[float, ...], float]] = {
    "8bit": ("the 8-bit paper's pair", "series-1", (), 1.8),
    "FlashOptim": ("FlashOptim's pair, groups of 32", "series-5", (6, 2), 1.8),
    "COAT": ("COAT's float8, groups of 128", "series-4", (2, 1.5), 1.8),
    "relative 1.5": ("m over √v, v as its root, dynamic", "series-3", (8, 2, 1.5, 2), 1.8),
    "log4 log8": ("m as log4, v as log8", "series-2", (), 1.8),
    "torchao 4-bit": ("torchao's 4 bits", "series-6", (2, 1.5), 1.8),
    "log4": ("log4", "series-2", (4, 1.5), 2.4),
    "log8": ("log8", "ink", (), 2.6),
}


def error_over_steps(results: dict[str, Any]) -> Figure:
    """Relative error of the displacement, both scales logarithmic."""
    figure = Figure((12.5, 8.2), layout="constrained", facecolor="white")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    marks = results["size"]["marks"]
    part = results["parts"]["finalists"]
    for axis, (case, title) in zip(grid.flat, list(LABELS.items())[:4], strict=True):
        for name, (label, colour, dashes, width) in LOOKS.items():
            errors = [part[name][case][str(mark)][0] for mark in marks]
            style = {"color": PALETTE[colour][0], "linewidth": width, "linestyle": (0, dashes) if dashes else "-"}
            axis.plot(
                marks,
                [float("nan") if e is None else e for e in errors],
                marker="o",
                markersize=4,
                label=label,
                **style,
            )
        axis.set(xscale="log", yscale="log")
        axis.set_title(title, color=INK)
        axis.xaxis.set_major_locator(FixedLocator(marks))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in grid[-1]:
        axis.set_xlabel("steps")
    for axis in grid[:, 0]:
        axis.set_ylabel("relative error of the displacement", color=INK)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


PICTURES = {"": error_over_steps}
