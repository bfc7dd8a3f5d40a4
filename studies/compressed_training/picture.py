"""Losses of compressed training less those of uncompressed training, step by step.

A row an optimizer, a column a width; in each panel the lecture's three kinds, and behind them how far bf16's
all-reduce drifts by rounding alone.
"""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from narrowgauge.cli._charts import INK, MUTED, PALETTE
from studies.compressed_training.page import Results, runs_of
from studies.compressed_training.rows import BITS, KINDS, OPTIMIZERS, REFERENCE, ROUNDED

STYLES = {"nearest": ("series-1", ()), "stochastic": ("series-2", (2, 1.5)), "feedback": ("series-3", (6, 2))}
TITLES = {"nearest": "to nearest", "stochastic": "stochastically", "feedback": "with error feedback"}
WIDE = 5  # points of a curve that are averaged


def differences(results: Results) -> Figure:
    """Thick lines are means over seeds, thin ones seeds; of one width and optimizer a panel."""
    figure = Figure((13, 7.6), layout="constrained", facecolor="white")
    for across, (axes, optimizer) in enumerate(zip(figure.subplots(2, len(BITS)), OPTIMIZERS, strict=True)):
        for axis, bits in zip(axes, BITS, strict=True):
            _band(axis, results, optimizer)
            for kind in KINDS:
                _lines(axis, above(results, optimizer, f"{bits} {kind}"), kind)
            axis.axhline(0, color=MUTED, linewidth=1.0)
            axis.set_title(f"{optimizer}, {bits} bits", color=INK)
            axis.margins(x=0.01)
            if across:
                axis.set_xlabel("step")
        axes[0].set_ylabel("training loss − uncompressed", color=INK)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def above(results: Results, optimizer: str, row: str) -> list[tuple[list[float], list[float]]]:
    """Of each seed steps, and means over some of them of losses less those of the uncompressed run."""
    known = {run["seed"]: run["curve"] for run in runs_of(results, optimizer, REFERENCE)}
    found = []
    for run in runs_of(results, optimizer, row):
        pairs = zip(run["curve"], known.get(run["seed"], []), strict=False)
        points = [(step, mine - theirs) for (step, mine), (_, theirs) in pairs if None not in (mine, theirs)]
        smooth = [points[first : first + WIDE] for first in range(0, len(points), WIDE)]
        if smooth:
            steps, losses = ([statistics.fmean(x[i] for x in part) for part in smooth] for i in (0, 1))
            found.append((steps, losses))
    return found


def _lines(axis: Any, found: list[tuple[list[float], list[float]]], kind: str) -> None:
    name, dashes = STYLES[kind]
    colour = PALETTE[name][0]
    for steps, losses in found:
        axis.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.5)
    if found:
        mean = [statistics.fmean(column) for column in zip(*(losses for _, losses in found), strict=False)]
        style = {"color": colour, "linewidth": 2.2, "linestyle": (0, dashes) if dashes else "-"}
        label = f"{TITLES[kind]} ({KINDS[kind]})"
        axis.plot(found[0][0][: len(mean)], mean, label=label, **style)


def _band(axis: Any, results: Results, optimizer: str) -> None:
    found = above(results, optimizer, ROUNDED)
    if found:
        most = [max(map(abs, column)) for column in zip(*(losses for _, losses in found), strict=False)]
        low, steps = [-x for x in most], found[0][0][: len(most)]
        axis.fill_between(steps, low, most, color=MUTED, alpha=0.2, linewidth=0, label="bf16: rounding alone")


PICTURES = {"": differences}
