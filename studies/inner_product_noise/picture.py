"""Noise against the length of the inner product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE

Results = dict[str, Any]
COLOURS = {name: light for name, (light, _) in PALETTE.items()}
PRODUCTS = {
    "grad_weight": ("weight gradient", "series-1", ()),
    "grad_input": ("input gradient", "series-3", (6, 2)),
    "output": ("output", "series-2", (2, 1.5)),
    "normal": ("normal numbers", "ink", (8, 2, 1.5, 2)),
}
SCHEMES = {
    "int8 row": "int8, a scale for each vector",
    "int8 tensor": "int8, a scale for the matrix",
    "e4m3 row": "float8 e4m3, a scale for each vector",
}


def noise_against_length(results: Results) -> Figure:
    """Noise and its share of the signal against k: thin lines are layers, thick ones their geometric mean."""
    figure = Figure((12.5, 8.6), layout="constrained", facecolor="white")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    for column, (scheme, title) in enumerate(SCHEMES.items()):
        for axis, quantity in zip(grid[:, column], ("normalised", "relative"), strict=True):
            for product, look in PRODUCTS.items():
                rows = [row for row in results["layers"] if row["product"] == product]
                _curves(axis, [row["k"] for row in rows], [row[scheme][quantity] for row in rows], look)
        grid[0, column].set_title(title, color=INK)
        lengths = np.array([64, results["tokens"]])
        start = results["layers"][-1][scheme]["normalised"][0]
        grid[0, column].plot(
            lengths,
            start * lengths / 64,
            color=MUTED,
            linewidth=1.2,
            linestyle=(0, (1, 2)),
            label="slope 1",
            zorder=4,
        )
    _name_worst(grid[1, 0], [row for row in results["layers"] if row["product"] == "grad_weight"])
    for axis in grid.flat:
        axis.set(xscale="log", yscale="log")
        axis.xaxis.set_major_locator(FixedLocator([64, 512, 4096, 32768]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.yaxis.set_major_locator(LogLocator(100 if axis in grid[0] else 10))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(math.log10(value))))
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_minor_locator(NullLocator())
    for axis in grid[1]:
        axis.set_xlabel("k, length of the inner product")
    grid[0, 0].set_ylabel("noise / (σᵤ² σᵥ²)", color=INK)
    grid[1, 0].set_ylabel("noise / signal", color=INK)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, handlelength=2.4)
    return figure


def _name_worst(axis: Any, rows: Sequence[Results]) -> None:
    """The name of the layer whose weight gradient is the noisiest in int8, at the end of its curve."""
    worst = max(rows, key=lambda row: row["int8 row"]["relative"][-1])
    end = worst["k"][-1], worst["int8 row"]["relative"][-1]
    name = worst["layer"].removeprefix("transformer.")
    axis.annotate(name, end, (0, 6), textcoords="offset points", ha="right", color=COLOURS["series-1"], fontsize=12)


def _curves(
    axis: Any,
    lengths: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    look: tuple[str, str, tuple[float, ...]],
) -> None:
    label, colour, dashes = look
    for k, curve in zip(lengths, values, strict=True):
        axis.plot(k, curve, color=COLOURS[colour], linewidth=0.8, alpha=0.45)
    common = [k for k in lengths[0] if all(k in other for other in lengths)]
    mean = [
        math.exp(np.mean([math.log(curve[list(ks).index(k)]) for ks, curve in zip(lengths, values, strict=True)]))
        for k in common
    ]
    axis.plot(
        common,
        mean,
        color=COLOURS[colour],
        linewidth=2.4,
        linestyle=(0, dashes) if dashes else "-",
        label=label,
        zorder=3,
    )


def _power(power: float) -> str:
    digits = str(round(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


PICTURES = {"": noise_against_length}
