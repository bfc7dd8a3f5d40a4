"""Figure 3 of Collage measured anew: lost updates, training perplexity and EDQ against steps, by option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from narrowgauge.cli._charts import INK, PALETTE
from studies.collage_training.page import REFERENCE, Results, first_of

COLOURS = {name: light for name, (light, _) in PALETTE.items()}
# Option: colour and dashes. D and what should lie upon it are told apart by dashes, not by colour alone.
LOOKS = {
    "D": (INK, ()),
    "fp32": (INK, (1, 1.5)),
    "A": (COLOURS["series-4"], ()),
    "kahan": (COLOURS["series-3"], (6, 2)),
    "B": (COLOURS["series-2"], (8, 2, 1.5, 2)),
    "C": (COLOURS["series-1"], (4, 1.5)),
    "adamw8bit-split8": (COLOURS["series-5"], (2, 1.5)),
}
Points = Callable[[Results], tuple[list[float], list[float]]]


def progress(results: Results) -> Figure:
    """Four panels at the first decay rate, seed 0; in the last one what perplexities of that size do not show."""
    beta2 = results["training"]["betas"][0]
    reference = first_of(results, REFERENCE, beta2)
    figure = Figure((13, 8), layout="constrained", facecolor="white")
    (lost, quality), (perplexity, above) = figure.subplots(2, 2)
    for name, (colour, dashes) in LOOKS.items():
        run = first_of(results, name, beta2)
        if run is None:
            continue
        style = {"color": colour, "linewidth": 1.8, "linestyle": (0, dashes) if dashes else "-", "label": name}
        for axis, points in ((lost, _lost), (perplexity, _perplexity), (quality, _quality)):
            axis.plot(*points(run), **style)
        if reference is not None:
            above.plot(*_above(run, reference), **style)
    lost.set_title("lost updates, %", color=INK)
    quality.set_title("effective descent quality", color=INK)
    perplexity.set_title("training perplexity", color=INK)
    perplexity.set_yscale("log")
    plain_numbers(perplexity.yaxis)
    above.set_title("training loss − that of D", color=INK)
    for axis in (perplexity, above):
        axis.set_xlabel("step")
    handles, labels = perplexity.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False, handlelength=2.6)
    return figure


def plain_numbers(axis: Any) -> None:
    """Labels of a logarithmic axis: 20, 50, 100; between them no label."""
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(NullLocator())


def _above(run: Results, reference: Results) -> tuple[list[float], list[float]]:
    pairs = [
        (step, loss - other)
        for (step, loss), (_, other) in zip(run["curve"], reference["curve"], strict=False)
        if loss is not None and other is not None
    ]
    return [step for step, _ in pairs], [x for _, x in pairs]


def _lost(run: Results) -> tuple[list[float], list[float]]:
    return _measured(run, "lost", 100.0)


def _quality(run: Results) -> tuple[list[float], list[float]]:
    return _measured(run, "edq", 1.0)


def _measured(run: Results, key: str, scale: float) -> tuple[list[float], list[float]]:
    pairs = [
        (s, scale * x) for s, x in zip(run["gauges"]["step"], run["gauges"][key], strict=True) if x is not None
    ]
    return [step for step, _ in pairs], [x for _, x in pairs]


def _perplexity(run: Results) -> tuple[list[Any], list[float]]:
    pairs = [(step, math.exp(min(loss, 50.0))) for step, loss in run["curve"] if loss is not None]
    return [step for step, _ in pairs], [x for _, x in pairs]


PICTURES = {"": progress}
