"""A page that needs nothing but itself: made from a template, written whole.

Values go to a template as text and are escaped there; only figures, which are our own, go in as they are. A page
allows itself no connection to anywhere: styles and figures are inline, and its policy forbids the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from narrowgauge._files import write_whole
from narrowgauge.cli._charts import PALETTE, LineStyle

# What stands where there is no value.
MISSING = "—"


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
        tables: its numbers.
        legend: lines of the drawing by their names.
    """

    title: str
    svg: Markup
    caption: str
    tables: list[Table]
    legend: dict[str, LineStyle] = field(default_factory=dict)


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write the page of a template of the command line, whole, in the colors of the figures."""
    write_whole(path, render(template, **values))


def render(template: str, **values: Any) -> str:
    """The page as text."""
    # Undefined names are errors: a page with a hole in it should not be written.
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(palette=PALETTE, **values)


def _source(name: str) -> str:
    return resources.files("narrowgauge.cli").joinpath("templates", name).read_text(encoding="utf-8")


def definitions(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Plain values by name, as terms and texts."""
    return [(key.replace("_", " "), fact(value)) for key, value in facts.items()]


def fact(value: object) -> str:
    """A plain value in words."""
    if value is None or isinstance(value, bool):
        return {None: MISSING, True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value))
    return value if isinstance(value, str) else json.dumps(value)


def number(value: float | None) -> str:
    """A number in a table: four digits that count, and words for what is not finite."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "−inf"}.get(value, "NaN")
    text = f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3e}"
    return text.replace("-", "−")
