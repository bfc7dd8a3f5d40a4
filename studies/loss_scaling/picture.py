"""Gradients by powers of two, and what a spike does to scale and loss, in four panels."""

from __future__ import annotations

import math
import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from narrowgauge.cli._charts import INK, MUTED, PALETTE
from studies.loss_scaling.look import NORMAL, SMALLEST
from studies.loss_scaling.page import QUIET, Results, histogram, looks, power, runs_of, together

COLOURS = {name: light for name, (light, _) in PALETTE.items()}
# By moment, and by scaler: colour and dashes.
MOMENTS = (("series-6", (1, 1.5)), ("series-2", (2, 1.5)), ("series-3", (6, 2)), ("ink", ()))
SCALERS = {"dynamic": ("series-1", ()), "by tensor": ("series-2", (6, 2)), "whole step": ("series-5", (2, 1.5))}
SPIKES = ("inf × 20", "large × 20")


def gradients_and_spikes(results: Results) -> Figure:
    """Histograms above; below the loss around the two long spikes, less that of the run without one."""
    figure = Figure((13, 8.4), layout="constrained", facecolor="white")
    above, under = figure.subplots(2, 2)
    for axis, what, title in zip(
        above, ("weights", "outputs"), ("gradients of weights", "gradients of layers' outputs"), strict=True
    ):
        _histograms(axis, looks(results), what)
        axis.set_title(f"{title}, % of the values by power of two", color=INK)
    for axis, name in zip(under, SPIKES, strict=True):
        _losses(axis, results, name)
        (title,) = [i["title"] for i in results["injections"] if i["name"] == name]
        axis.set_title(f"loss − that without a spike:\n{title}", color=INK)
        axis.set_xlabel("step")
    return figure


def _histograms(axis: Any, found: list[Results], what: str) -> None:
    for look, (colour, dashes) in zip(found, MOMENTS, strict=False):
        powers, shares = histogram(together(look[what]))
        shown = [(k, share) for k, share in zip(powers, shares, strict=True) if -45 <= k <= 5]
        axis.plot(*zip(*shown, strict=True), label=f"step {look['step']}", **_style(colour, dashes))
    axis.axvspan(SMALLEST, NORMAL, color=COLOURS["series-5"], alpha=0.12, linewidth=0)
    axis.axvspan(-45, SMALLEST, color=COLOURS["series-1"], alpha=0.14, linewidth=0)
    axis.set_xlim(-45, 5)
    top = axis.get_ylim()[1]
    axis.set_ylim(0, 1.12 * top)
    for place, words in ((-44.5, "below fp16's least"), (SMALLEST + 0.4, "subnormal")):
        axis.text(place, 1.03 * top, words, color=MUTED, fontsize=11)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda k, _: power(2.0**k) if k else "1"))
    axis.legend(frameon=False, loc="upper right")


def _losses(axis: Any, results: Results, name: str) -> None:
    for row, (colour, dashes) in SCALERS.items():
        lines = [line for run in runs_of(results, name, row) if (line := _above(results, run))]
        if not lines:
            continue
        first = runs_of(results, name, row)[0]["around"]["first"]
        mean = [statistics.fmean(column) for column in zip(*lines, strict=False)]
        steps = range(first, first + len(mean))
        for line in lines:
            axis.plot(steps[: len(line)], line[: len(steps)], color=COLOURS[colour], linewidth=0.6, alpha=0.5)
        axis.plot(steps, mean, label=row, **_style(colour, dashes))
    spiked = results["training"]["spiked"]
    axis.axvline(spiked, color=MUTED, linewidth=1.0)
    if axis.lines[:-1]:
        axis.legend(
            loc="upper left", borderaxespad=0.0, edgecolor="none", framealpha=0.9, fontsize=12, handlelength=1.8
        )
    axis.margins(x=0.01)


def _above(results: Results, run: Results) -> list[float]:
    """Losses of a run less those of the same run without a spike."""
    quiet = next((r for r in runs_of(results, QUIET, run["row"]) if r["seed"] == run["seed"]), None)
    if quiet is None:
        return []
    pairs = zip(run["around"]["losses"], quiet["around"]["losses"], strict=False)
    return [math.nan if a is None or b is None else a - b for a, b in pairs]


def _style(colour: str, dashes: tuple[float, ...]) -> dict[str, Any]:
    return {"color": COLOURS[colour], "linewidth": 1.8, "linestyle": (0, dashes) if dashes else "-"}


PICTURES = {"": gradients_and_spikes}
