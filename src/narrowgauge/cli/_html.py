"""A page that needs nothing but itself: made from a template, written whole.

Values go to a template as text and are escaped there; only figures, which are our own, go in as they are. A page
allows itself no connection to anywhere: styles and figures are inline, and its policy forbids the rest.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from narrowgauge.cli._charts import PALETTE
from narrowgauge.cli._files import write_whole

# What stands where there is no value.
MISSING = "—"


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write the page of a template of this package, whole, in the colors of the figures."""
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
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def join(words: list[str]) -> str:
    """A list in a sentence: a, b and c."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
