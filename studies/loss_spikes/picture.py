"""Figures 4 and 5 in small: the loss and RMS_t around the switch, for each optimizer."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE
from studies.loss_spikes.page import by_way, caused

BEFORE, AFTER = 40, 60
THRESHOLD = 2.3
SPIKE, CALM, MIDDLE = (PALETTE[name][0] for name in ("series-1", "series-2", "series-3"))


def around_the_switch(results: dict[str, Any]) -> Figure:
    """A column for each optimizer: losses above, RMS_t of embedding and middle layer below, a thin line a seed."""
    ways = by_way(results)
    switch = results["training"]["switch"]
    figure = Figure((3.1 * len(ways), 6.6), layout="constrained", facecolor="white")
    grid = figure.subplots(2, len(ways), sharex=True, sharey="row")
    steps = range(switch - BEFORE + 1, switch + AFTER + 1)
    place = slice(steps[0] - 1, steps[-1])
    for (top, bottom), (name, runs) in zip(grid.T, ways.items(), strict=True):
        for run in runs:
            first = run is runs[0]
            style = {"linewidth": 1.8 if first else 0.7, "alpha": 1.0 if first else 0.55}
            top.plot(steps, run["loss"][place], color=INK, **style)
            bottom.plot(steps, run["embedding_rms"][place], color=CALM, label="image embedding", **style)
            middle = {**style, "color": MIDDLE, "linestyle": (0, (4, 2))}
            bottom.plot(steps, run["middle_rms"][place], label="a layer in the middle", **middle)
            for start, _ in caused(run, results):
                top.plot(start, run["loss"][start - 1], "o", color=SPIKE, markersize=7, zorder=4)
        top.set_title(name.replace(", gradients", ",\ngradients").replace(", m²", ",\nm²"), color=INK, fontsize=12)
        _switch(top, switch)
        _switch(bottom, switch)
        bottom.axhline(THRESHOLD, color=SPIKE, linewidth=1.2, linestyle=(0, (1, 1.5)))
        bottom.set(yscale="log", xlabel="step")
        bottom.yaxis.set_major_locator(FixedLocator([0.5, 1, 2.3, 5, 10]))
        bottom.yaxis.set_minor_locator(NullLocator())
        bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bottom.xaxis.set_major_locator(FixedLocator([switch - BEFORE, switch, switch + AFTER]))
    grid[0, 0].set_ylabel("loss of a sample", color=INK)
    grid[1, 0].set_ylabel("RMS_t", color=INK)
    handles, labels = (each[:2] for each in grid[1, 0].get_legend_handles_labels())
    (dot,) = grid[0, 0].plot([], [], "o", color=SPIKE, markersize=7)
    figure.legend(
        [*handles, dot], [*labels, "start of a loss spike"], loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def _switch(axes: Axes, step: int) -> None:
    axes.axvline(step + 0.5, color=MUTED, linewidth=1.0)


PICTURES = {"": around_the_switch}
