"""Figures 4 and 5 of the 8-bit paper measured anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from narrowgauge.cli._charts import INK, PALETTE

Results = dict[str, Any]
COLOURS = {name: light for name, (light, _) in PALETTE.items()}
MAPS = {
    "linear tensor": "linear, tensor-wise",
    "dynamic tensor": "dynamic, tensor-wise",
    "dynamic 2048": "dynamic, blocks of 2048",
}
QUANTITIES = {
    "usage": ("use: share of the updates", "viridis", (-8, -2)),
    "absolute": ("mean |u − u₈|", "magma", (-5, 3)),
    "relative": ("mean |u − u₈| / |u|", "magma", (-3, 3)),
}
RARE = 1e-6  # share of the updates below which the mean error of a code is left out: chance
LINES = {
    "linear tensor": ("linear", "series-1", (2, 1.5)),
    "quantile tensor": ("quantile", "series-4", (8, 2, 1.5, 2)),
    "inverse_dynamic tensor": ("inverse dynamic", "series-3", (4, 1.5)),
    "dynamic tensor": ("dynamic", "series-2", (6, 2)),
    "dynamic 2048": ("dynamic, blocks of 2048", "ink", ()),
}


def adam_maps(results: Results, arrays: dict[str, np.ndarray]) -> Figure:
    """Figure 4: use, absolute and relative error of all pairs of codes, for three ways to quantize."""
    figure = Figure((12.5, 11.4), layout="constrained", facecolor="white")
    grid = figure.subplots(3, 3, sharex=True, sharey=True)
    for row, (quantity, (title, colours, limits)) in zip(grid, QUANTITIES.items(), strict=True):
        for axis, (name, label) in zip(row, MAPS.items(), strict=True):
            values = arrays[f"{name} both {quantity}"].astype(np.float64).T
            if quantity == "usage":
                values = values - math.log10(results["elements"])
                error = arrays[f"{name} both absolute"].astype(np.float64).T
            values[~np.isfinite(values)] = np.nan
            image = axis.imshow(
                values, origin="lower", extent=(-1, 1, 0, 1), aspect="auto", cmap=colours,
                vmin=limits[0], vmax=limits[1], interpolation="nearest",
            )  # fmt: skip
            axis.grid(False)
            axis.set_facecolor("#f2f4f6")
            if quantity == "usage":
                blocks = name.split()
                overlap = results["maps"][blocks[0]][blocks[1]]["both"]["overlap"]
                axis.set_title(f"{label}\noverlap {100 * overlap:.2g} %", color=INK)
                marks = _mark_worst(axis, error)
        bar = figure.colorbar(image, ax=row[-1], pad=0.02, extend="both" if quantity != "usage" else "neither")
        bar.set_label(title, color=INK)
        bar.ax.yaxis.set_major_locator(FixedLocator(range(limits[0], limits[1] + 1, 2)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda power, _: _power(power)))
        bar.outline.set_visible(False)
    for axis in grid[-1]:
        axis.set_xlabel("code of m")
        axis.set(xticks=[-1, 0, 1], xticklabels=["−1", "0", "1"])
    for axis in grid[:, 0]:
        axis.set_ylabel("code of v")
        axis.set(yticks=[0, 1], yticklabels=["0", "1"])
    label = "the worst 5 % of the cells, by mean |u − u₈|; overlap: the share of the updates that fall there"
    figure.legend([marks], [label], loc="outside lower center", frameon=False, markerscale=4)
    return figure


def _mark_worst(axis: Any, error: np.ndarray) -> Any:
    """Dots on the cells with the worst 5 % of the mean absolute errors."""
    known = np.isfinite(error)
    rows, columns = np.nonzero(known & (error >= np.quantile(error[known], 0.95)))
    x, y = (columns + 0.5) / 64 - 1, (rows + 0.5) / 128
    return axis.scatter(x, y, s=3.2, marker="s", color=COLOURS["series-1"], linewidths=0)


def _power(power: float) -> str:
    digits = str(round(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def errors_by_code(results: Results) -> Figure:
    """Figure 5: the mean absolute Adam error of every code of m, both moments quantized."""
    figure = Figure((12.5, 5.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharex=True)
    for name, (label, colour, dashes) in LINES.items():
        for axis, condition in ((left, "m"), (right, "both")):
            found = results["codes"][name][condition]
            usage = np.array(found["usage"])
            error = np.where(usage > RARE, np.array(found["absolute"], float), np.nan)
            place = 2 * np.arange(len(usage)) / np.flatnonzero(usage).max() - 1
            style = {"color": COLOURS[colour], "linewidth": 1.8, "linestyle": (0, dashes) if dashes else "-"}
            axis.plot(place, error, label=label, **style)
    for axis, title in (
        (left, "mean |u − u₈|, m alone quantized"),
        (right, "mean |u − u₈|, both quantized, ε = 10⁻⁸"),
    ):
        axis.set_yscale("log")
        axis.set_title(title, color=INK)
        axis.set_xlabel("code of m, by its place: 0 is nearest to zero")
        axis.set(xticks=[-1, -0.5, 0, 0.5, 1], xticklabels=["−1", "−½", "0", "½", "1"])
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(math.log10(value))))
        axis.margins(x=0.01)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


PICTURES = {"_maps": adam_maps, "_codes": errors_by_code}
