"""The loss of each row as a fit forecasts it, from replays alone, beside the one of trainings with other seeds.

A forecast is the descent that rounding loses, with its sign, plus what its random errors cost. A row's forecast is
**right** if it is within 0.002 of the mean difference from D, or within a factor of 2 of it with the same sign.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from narrowgauge.recipes._choices import TOLERANCE
from narrowgauge.recipes._fit._replay import GROWS, SHRINKS
from studies.fit.compared import Cell, cell_of, cells, fits, found, spread
from studies.fit.rows import REFERENCE
from studies.shared import pictures
from studies.shared.pictures import COLORS, INK, MUTED
from studies.shared.tables import Results, markdown

NEAR, FACTOR = 0.002, 2.0  # nats; a multiple of the measured difference
_MAIN, _LARGE = 3.0, 0.003  # a part decides a forecast if it is 3 times the other part and 0.003 nats
MARKERS = {"micro": "o", "llama-micro": "s", "bert-micro": "^", "clip-micro": "D"}


@dataclass(frozen=True)
class Forecast:
    """A row in a setting: what was forecast, and what was measured."""

    cell: Cell
    name: str
    kind: str
    descent: float
    random: float
    loss: float  # how far the loss may move
    measured: float
    spread: float  # of the setting

    @property
    def total(self) -> float:
        """The difference from D that is forecast."""
        return self.descent + self.random

    @property
    def right(self) -> bool:
        """Whether it is near the measured one; see the module."""
        ratio = self.total / self.measured if self.measured else 0.0
        return abs(self.total - self.measured) <= NEAR or 1 / FACTOR <= ratio <= FACTOR


def forecasts(results: Results) -> list[Forecast]:
    """All rows that were forecast and trained; D, which others are compared with, is left out."""
    made = []
    by_cell = {cell_of(fit): fit for fit in fits(results)}
    for cell in cells(results):
        fit, rows = by_cell.get(cell, {}), found(results, cell)
        for row in rows:
            parts = fit.get("forecast", {}).get(row.name)
            if row.name != REFERENCE and row.mean is not None and parts and None not in parts:
                made.append(Forecast(
                    cell, row.name, row.kind, *parts, fit["loss"][row.name], row.mean, spread(rows)
                ))  # fmt: skip
    return made


def _rank_correlation(each: Sequence[Forecast]) -> float | None:
    if len(each) < 3:
        return None
    ranks = [np.argsort(np.argsort(values)) for values in ([f.total for f in each], [f.measured for f in each])]
    return float(np.corrcoef(*ranks)[0, 1])


def _fitting(each: Sequence[Forecast], main: str) -> float | None:
    """What a constant would have to be in a setting: the median over the rows whose forecast one part decides."""
    other, constant = ("random", SHRINKS) if main == "descent" else ("descent", GROWS)
    ratios = [
        f.measured / f.total
        for f in each
        if abs(getattr(f, main)) > max(_LARGE, _MAIN * abs(getattr(f, other)))
    ]  # fmt: skip
    return constant * statistics.median(ratios) if ratios else None


def right(results: Results) -> str:
    """By setting: how often forecasts are right, and what the constants would have to be."""
    lines = []
    for cell, group in itertools.groupby(forecasts(results), key=lambda f: f.cell):
        each = list(group)
        lines.append([
            f"{cell[0]}, {cell[1]:g}", str(len(each)), _shown(_rank_correlation(each), ".2f"),
            f"{100 * _share(each, lambda f: f.right):.0f} %", _shown(_fitting(each, "descent"), ".2f"),
            _shown(_fitting(each, "random"), ".1f"),
        ])  # fmt: skip
    head = ("model, learning rate", "rows", "correlation of ranks", "right", f"{SHRINKS:g} would be",
            f"{GROWS:g} would be")  # fmt: skip
    return markdown(head, lines)


def beside(results: Results) -> str:
    """Every row: forecast and measured difference from D, by setting."""
    each = forecasts(results)
    places = list(dict.fromkeys(f.cell for f in each))
    by_place = {(f.name, f.cell): f for f in each}

    def cell(name: str, place: Cell) -> str:
        f = by_place.get((name, place))
        return f"{f.total:+.4f} / {f.measured:+.4f}" if f else ""

    names = [row["name"] for row in results["rows"] if any(f.name == row["name"] for f in each)]
    lines = [[name, *(cell(name, place) for place in places)] for name in names]
    return markdown(("row", *(f"{model}, {lr:g}" for model, lr, _ in places)), lines)


def _share(each: Sequence[Forecast], good: Callable[[Forecast], bool]) -> float:
    return sum(map(good, each)) / max(1, len(each))


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def facts(results: Results) -> dict[str, str]:
    """Numbers of the page's sentences."""
    each = forecasts(results)
    within = [f for f in each if f.loss <= TOLERANCE]
    kept = [f for f in within if abs(f.measured) <= max(TOLERANCE, f.spread)]
    lower = [f for f in each if f.measured < -max(TOLERANCE, f.spread)]
    return {
        "forecast_rows": str(len(each)),
        "forecast_right": str(sum(f.right for f in each)),
        "forecast_uniform": str(sum(f.kind == "uniform" for f in each)),
        "forecast_uniform_right": str(sum(f.right for f in each if f.kind == "uniform")),
        "forecast_correlation": _shown(_rank_correlation(each), ".2f") or "no",
        "tolerance": f"{TOLERANCE:g}",
        "within": str(len(within)),
        "within_kept": str(len(kept)),
        "lower": str(len(lower)),
        "lower_forecast": str(sum(f.descent < 0 and f.total < 0 for f in lower)),
    }


def picture(results: Results) -> Figure:
    """A panel for each learning rate: the forecast difference from D against the measured one."""
    each = forecasts(results)
    rates = sorted({f.cell[1] for f in each}, reverse=True) or [0.0]
    figure, axes = pictures.figure(5.6 * len(rates), 5.9, 1, len(rates), squeeze=False)
    for axis, rate in zip(axes.flat, rates, strict=True):
        _panel(axis, [f for f in each if f.cell[1] == rate])
        axis.set_title(f"learning rate {rate:g}", fontsize=12)
        axis.set_xlabel(f"forecast: loss − that of {REFERENCE}, nats")
    axes[0, 0].set_ylabel(f"measured: loss − that of {REFERENCE}, nats")
    pictures.below(figure, axes.flat[0], 4)
    return figure


def _panel(axis: Any, each: Sequence[Forecast]) -> None:
    values = [x for f in each for x in (f.total, f.measured)] or [0.01]
    most = 1.8 * max(0.01, *map(abs, values))
    ends = min(-NEAR, 1.8 * min(values)), 1.8 * max(0.01, *values)
    line = np.concatenate([-np.geomspace(1e-5, most, 200)[::-1], np.geomspace(1e-5, most, 200)])
    low = np.minimum(line - NEAR, np.minimum(line * FACTOR, line / FACTOR))
    high = np.maximum(line + NEAR, np.maximum(line * FACTOR, line / FACTOR))
    axis.fill_between(line, low, high, color=MUTED, alpha=0.16, linewidth=0, label="right: 0.002, or a factor of 2")
    axis.plot(line, line, color=MUTED, linewidth=1)
    for model, marker in MARKERS.items():
        of = [f for f in each if f.cell[0] == model]
        for kind, color, face in (
            ("uniform", COLORS["series-2"], "white"), ("random", INK, INK), ("fitted", COLORS["series-1"], None),
        ):  # fmt: skip
            some = [f for f in of if f.kind == kind]
            axis.plot(
                [f.total for f in some], [f.measured for f in some], marker, color=color, linestyle="none",
                markerfacecolor=color if face is None else face, markersize=3 if kind == "random" else 5.5,
                label=f"{model}, {kind}" if some else None,
            )  # fmt: skip
    at = [s * t for t in (0.001, 0.01, 0.1, 1) for s in (1, -1) if ends[0] <= s * t <= ends[1]]
    for scale, limits in (("x", axis.set_xlim), ("y", axis.set_ylim)):
        limits(*ends)
        getattr(axis, f"set_{scale}scale")("symlog", linthresh=0.001, linscale=0.6)
        pictures.ticks(
            getattr(axis, f"{scale}axis"), [0.0, *at], lambda v: f"{v:+g}".replace("-", "−") if v else "0"
        )


TABLES = {"right": right, "beside": beside}
PICTURES = {"_forecast": picture}
