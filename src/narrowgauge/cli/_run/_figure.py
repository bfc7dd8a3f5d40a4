"""A figure of a run's page, with the table of its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from narrowgauge.cli._drawing import SERIES, Look
from narrowgauge.gauges._history import History

FIRST, SECOND, THIRD = (Look(SERIES[i], dashes, 1.8) for i, dashes in enumerate(((), (6, 2), (2, 1.5))))
PLAIN = Look("ink", (), 2.0)
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
    legend: dict[str, Look] = field(default_factory=dict)


def late_median(history: History, kind: str, name: str, key: str) -> float:
    values = history.series(kind, key, name).finite.values
    return float(np.median(values[len(values) // 2 :])) if len(values) else float("nan")
