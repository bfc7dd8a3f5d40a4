"""Figures 4, 5 and 20 on a CLIP: loss and RMS_t under four ways, with and without a change of the signal."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from narrowgauge.cli._charts import INK, MUTED, PALETTE
from studies.stability.page import LONG, PLAIN, SHORT, STABLE, Results

THRESHOLD = 2.3
SPIKE, PATCHES, MIDDLE = (PALETTE[name][0] for name in ("series-1", "series-2", "series-3"))
SHOWN = ((PLAIN, LONG), (STABLE, LONG), ("AdamW, clipped to 1", LONG), (PLAIN, SHORT))


def losses_and_rms(results: Results) -> Figure:
    """A column for each way, seed 0; two rows where the signal changes, two where it does not, as far as run."""
    groups = [runs for changed in (True, False) if (runs := _runs(results, changed))]
    figure = Figure((13, 0.8 + 5.4 * max(1, len(groups))), layout="constrained", facecolor="white")
    if not groups:
        return figure
    grid = figure.subplots(2 * len(groups), len(SHOWN), sharex=True, sharey="row", squeeze=False)
    for place, runs in enumerate(groups):
        for column, (row, beta2) in enumerate(SHOWN):
            top, bottom = grid[2 * place][column], grid[2 * place + 1][column]
            if (row, beta2) in runs:
                _draw(top, bottom, runs[row, beta2], results)
            changed = any(run["signal"] != 1.0 for run in runs.values())
            top.set_title(f"{row}, β2 {beta2:g}" + ("\nsignal changes" if changed else ""), color=INK, fontsize=12)
        grid[2 * place][0].set_ylabel("loss", color=INK)
        grid[2 * place + 1][0].set_ylabel("RMS_t", color=INK)
    for axis in grid[-1]:
        axis.set_xlabel("step")
    handles, labels = grid[1][0].get_legend_handles_labels()
    (dot,) = grid[0][0].plot([], [], "o", color=SPIKE, markersize=6)
    figure.legend(
        [*handles, dot], [*labels, "start of a loss spike"], loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def _runs(results: Results, changed: bool) -> dict[tuple[str, float], Results]:
    """Runs of the base with all their steps, by way and beta2."""
    base = {name: results["training"][name] for name in ("model", "lr", "batch")}
    return {
        (run["row"], run["beta2"]): run
        for run in results["runs"]
        if base.items() <= run.items() and (run["signal"] != 1.0) == changed and "losses" in run
    }


def _draw(top: Any, bottom: Any, run: Results, results: Results) -> None:
    steps = range(1, len(run["losses"]) + 1)
    top.plot(steps, _numbers(run["losses"]), color=INK, linewidth=1.0)
    for step in run["loss_spikes"]:
        top.plot(step, run["losses"][step - 1], "o", color=SPIKE, markersize=6, zorder=4)
    for name, label, colour in (
        ("patches", "patch embedding", PATCHES),
        ("middle", "a layer in the middle", MIDDLE),
    ):
        bottom.plot(steps, _numbers(run["rms_t"][name]), color=colour, linewidth=1.0, label=label)
    if run["signal"] != 1.0:
        for axis in (top, bottom):
            axis.axvline(results["training"]["switched"], color=MUTED, linewidth=1.0)
    bottom.axhline(THRESHOLD, color=SPIKE, linewidth=1.2, linestyle=(0, (1, 1.5)))
    bottom.set_yscale("log")
    bottom.yaxis.set_major_locator(FixedLocator([0.2, 0.5, 1, 2.3, 5, 10, 20]))
    bottom.yaxis.set_minor_locator(NullLocator())
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


PICTURES = {"": losses_and_rms}
