"""Weights and updates, embeddings and other matrices, and a largest magnitude beside its moving average."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from narrowgauge.cli._charts import INK, PALETTE
from studies.training_magnitudes.page import DECAY, rows_of, runs_of

WARM, COOL, OTHER = (PALETTE[name][0] for name in ("series-1", "series-2", "series-3"))


def magnitudes(results: dict[str, Any]) -> Figure:
    """A row for each model, of its first seed."""
    rows = rows_of(results)
    figure = Figure((13, 3.9 * len(rows)), layout="constrained", facecolor="white")
    grid = figure.subplots(len(rows), 3, squeeze=False)
    for row, (norms, gradients, features) in zip(rows, grid, strict=True):
        run = runs_of(results, row["name"])[0]
        norms.plot(run["looked"], run["weight_norm"], color=INK, label="weights")
        norms.plot(run["looked"], run["update_norm"], color=WARM, linestyle=(0, (6, 2)), label="update")
        norms.set_title(f"{row['title']}: norm of all weights, and of a step's update", color=INK, fontsize=11)
        steps = range(1, len(run["loss"]) + 1)
        gradients.plot(steps, run["embedding_gradient"], color=WARM, label="token embedding", linewidth=1.2)
        gradients.plot(
            steps, run["largest_gradient"], color=OTHER, linestyle=(0, (6, 2)), label="largest other", linewidth=1.2
        )
        gradients.plot(
            steps, run["median_gradient"], color=COOL, linestyle=(0, (2, 1.5)), label="median matrix", linewidth=1.2
        )
        gradients.set_title("largest element of the gradient", color=INK, fontsize=11)
        values = run["last block, max"]
        features.plot(steps, values, color=INK, linewidth=1.2, label="largest magnitude")
        features.plot(
            steps, _average(values), color=WARM, linestyle=(0, (6, 2)), linewidth=1.2, label="its moving average"
        )
        features.plot(
            steps,
            run["last block, mean"],
            color=COOL,
            linestyle=(0, (2, 1.5)),
            linewidth=1.2,
            label="mean magnitude",
        )
        features.set_title("what the last block gives out", color=INK, fontsize=11)
        for axis in (norms, gradients, features):
            axis.set(yscale="log", xlabel="step")
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.legend(frameon=False, fontsize=10, loc="best")
    return figure


def _average(values: list[float]) -> list[float]:
    """As it stands before each step."""
    found, average = [], values[0]
    for value in values:
        found.append(average)
        average = DECAY * average + (1 - DECAY) * value
    return found


PICTURES = {"": magnitudes}
