"""What the figures of a run's page share: a figure with the table of its numbers, and thinned numbers.

A run of 100 000 steps has more of everything than a page has points. A curve keeps the lowest and the highest value
of each stretch, a cell of a heat map the worst of what falls into it, and a table the first, the last, the median
and the worst. What is thinned says so under its figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from narrowgauge.cli._charts import SERIES, Floats, LineStyle
from narrowgauge.gauges._history import History, Series
from narrowgauge.gauges._spike_matching import find_precursors

FIRST, SECOND, THIRD = (LineStyle(SERIES[i], dashes, 1.8) for i, dashes in enumerate(((), (6, 2), (2, 1.5))))
PLAIN = LineStyle("ink", (), 2.0)
# A table of steps has so many rows, a table of tensors as many as a heat map.
STEPS = 40


@dataclass(frozen=True)
class Table:
    """A figure's numbers: names of the columns, rows whose first cell is their name, and what was left out."""

    columns: list[str]
    rows: list[list[str]]
    remark: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Attributes:
        title: what it shows.
        svg: the drawing.
        caption: how to read it.
        legend: lines of the drawing by their names.
        tables: its numbers.
    """

    title: str
    svg: Markup
    caption: str
    tables: list[Table]
    legend: dict[str, LineStyle] = field(default_factory=dict)


def late_median(history: History, kind: str, name: str, key: str) -> float:
    values = history.series(kind, key, name).finite.values
    return float(np.median(values[len(values) // 2 :])) if len(values) else float("nan")


# What a heat map shows at most, in rows and columns; beyond, neighbours share a cell.
ROWS, COLUMNS = 320, 160
# Longest label of a row, in characters.
LABEL = 26


@dataclass(frozen=True)
class Grid:
    """A number of many tensors over the steps, thinned.

    Attributes:
        names: the tensor, or the first and the last of several, of each row.
        steps: the first step of each column, and last of all the end.
        values: (rows, columns), the worst of each cell; NaN where nothing was measured.
        broken: (rows, columns), where something measured was not finite.
        shared: how many steps and tensors share a cell at most.
    """

    names: list[str]
    steps: NDArray[np.int64]
    values: Floats
    broken: NDArray[np.bool_]
    shared: tuple[int, int]


def grid(history: History, kind: str, field: str, target: float) -> Grid | None:
    """A number of every tensor of a kind; the worst is what is farthest from the target. None if there is none."""
    names, steps, values = history.matrix(kind, field)
    if not names:
        return None
    measured = np.zeros(values.shape, bool)
    for row, name in zip(measured, names, strict=True):
        row[np.searchsorted(steps, history.series(kind, field, name).steps)] = True
    broken = measured & ~np.isfinite(values)
    rows = np.array_split(np.arange(len(names)), min(len(names), ROWS))
    columns = np.array_split(np.arange(len(steps)), min(len(steps), COLUMNS))
    thin = np.full((len(rows), len(columns)), np.nan)
    marks = np.zeros(thin.shape, bool)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            cell = values[np.ix_(row, column)]
            finite = cell[np.isfinite(cell)]
            if len(finite):
                thin[i, j] = finite[np.argmax(np.abs(finite - target))]
            marks[i, j] = broken[np.ix_(row, column)].any()
    ends = [names[row[0]] if len(row) == 1 else f"{names[row[0]]} … {names[row[-1]]}" for row in rows]
    shared = (max(map(len, columns)), max(map(len, rows)))
    return Grid(ends, np.append([steps[c[0]] for c in columns], steps[-1]), thin, marks, shared)


def short(names: Sequence[str]) -> list[str]:
    """Names as labels: without the parts that all have in front, the end of what is still too long."""
    parts = [name.split(".") for name in names]
    common = 0
    while len(names) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    labels = [".".join(p[common:]) for p in parts]
    return [label if len(label) <= LABEL else "…" + label[1 - LABEL :] for label in labels]


def embedding_and_middle(history: History) -> tuple[str | None, str | None]:
    """The two tensors whose RMS_t the paper compares: an embedding, and a matrix from the middle of the model.

    Of several embeddings the one that foretold most loss spikes, else the one whose RMS_t went highest.
    """
    names = [name for name in history.names("update") if len(history.series("update", "rms", name).finite.steps)]
    shapes = history.parameters
    matrices = [name for name in names if len(shapes.get(name) or []) >= 2] or names
    embeddings = [name for name in matrices if history.is_embedding(name)]
    rest = [name for name in matrices if name not in embeddings]
    inside = [name for name in rest if re.search(r"\.\d+\.", name)] or rest
    foretold = [name for name, _ in find_precursors(history).matched.values()]

    def told(name: str) -> tuple[int, float]:
        values = history.series("update", "rms", name).since(history.settled).finite.values
        return foretold.count(name), float(np.max(values, initial=0.0))

    first = max(embeddings, key=told) if embeddings else None
    return first, inside[len(inside) // 2] if inside else None


def number(value: float | None) -> str:
    """A number in a table: four digits that count, and words for what is not finite."""
    if value is None:
        return "—"
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "−inf"}.get(value, "NaN")
    text = f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3e}"
    return text.replace("-", "−")


def span(series: Series, target: float) -> list[str]:
    """First, median, worst (with its step) and last value of a series, as cells."""
    values, finite = series.values, series.finite
    broken = np.flatnonzero(~np.isfinite(values))
    if len(broken):
        worst = int(broken[0])
    else:
        worst = int(np.argmax(np.abs(values - target)))
    middle = float(np.median(finite.values)) if len(finite.values) else math.nan
    at = f"{number(float(values[worst]))} (step {int(series.steps[worst]):,})"
    return [number(float(values[0])), number(middle), at, number(float(values[-1]))]
