"""The studies' pictures: which one a name asks for, Figures 4 and 5 of the 8-bit paper measured anew, and noise.

Colours are after Okabe and Ito, or viridis and its kin for maps: safe for colour-blind readers, and lines differ in
dashes too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bytes_picture
import _clip_picture
import _collage_picture
import _compressed_picture
import _eight_bit_adam_picture
import _loss_spikes_picture
import _magnitudes_picture
import _scaling_picture
import _stability_picture
import _state_picture
import _throughput_picture
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE, drawing

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


def draw(results: Path, path: Path) -> None:
    """The picture of a name that says which: a results file's, with `_maps` or `_codes` where a study has two."""
    stem = path.stem.removesuffix("_maps").removesuffix("_codes")
    found = json.loads((results / f"{stem}.json").read_text())
    with drawing():
        if path.stem.endswith("_maps"):
            with np.load(results / f"{path.stem}.npz") as arrays:
                figure = adam_maps(found, dict(arrays))
        elif path.stem.startswith("bytes_and_loss"):
            figure = _bytes_picture.bytes_against_loss(found)
        elif path.stem.startswith("clip_precision"):
            figure = _clip_picture.progress(found)
        elif path.stem.startswith("collage_training"):
            figure = _collage_picture.progress(found)
        elif path.stem.startswith("collage_throughput"):
            figure = _throughput_picture.peaks(found)
        elif path.stem.startswith("compressed_training"):
            figure = _compressed_picture.differences(found)
        elif path.stem.startswith("eight_bit_adam"):
            figure = _eight_bit_adam_picture.sensitivity(found)
        elif path.stem.startswith("state_codecs"):
            figure = _state_picture.error_over_steps(found)
        elif path.stem.startswith("loss_scaling"):
            figure = _scaling_picture.gradients_and_spikes(found)
        elif path.stem.startswith("training_magnitudes"):
            figure = _magnitudes_picture.magnitudes(found)
        elif path.stem.startswith("stability"):
            figure = _stability_picture.losses_and_rms(found)
        elif path.stem.startswith("loss_spikes"):
            figure = _loss_spikes_picture.around_the_switch(found)
        else:
            figure = errors_by_code(found) if path.stem.endswith("_codes") else noise_against_length(found)
        figure.savefig(path, format="png", dpi=130, bbox_inches="tight", pad_inches=0.15)


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
