"""What both benchmarks do with their figures: a table as it grows, a results file, a picture."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from narrowgauge.cli._files import UsageError, picture_path, write_output

Figures = Mapping[str, Any]


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write a results file, whole, with its folder."""
    write_output("--json", path, json.dumps(results, indent=1) + "\n")


class Output:
    """Where figures go.

    Attributes:
        failed: whether any row failed.
    """

    def __init__(self, seconds: float, json: Path | None, figure: Path | None) -> None:
        """Check the options that both benchmarks have."""
        if not 0 < seconds < math.inf:
            raise UsageError(f"--seconds must be a finite number above 0, got {seconds}")
        self._figure = None if figure is None else picture_path("--figure", figure)
        self._json, self._console, self.failed = json, Console(), False

    def begin(self, results: Mapping[str, Any]) -> None:
        """Write the results file before an hour of measuring, and name the machine."""
        self.write(results)
        environment = results["environment"]
        self.say(f"{environment['device']}, torch {environment['torch']}")

    def write(self, results: Mapping[str, Any]) -> None:
        """Write the results file, whole, if there is one."""
        if self._json is not None:
            write_json(self._json, results)

    def say(self, text: str) -> None:
        """Lines of plain text."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def table(self, title: str, head: str, columns: Mapping[str, tuple[str, str]]) -> Iterator[Callable[..., None]]:
        """A table that grows; in lines below it what failed.

        Args:
            title: of the table.
            head: title of the first column.
            columns: by title, the key of a figure and how it is written.

        Yields:
            A function that adds a row: its name, its figures, its group.
        """
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(head, no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        groups: list[str] = []
        failures: list[str] = []

        def add(name: str, figures: Figures, group: str = "") -> None:
            failures.extend(
                f"{name}: {key}: {figures[key]}" for key in ("failed", "graph_failed") if key in figures
            )
            if "failed" in figures:
                self.failed = True
                return
            if groups and groups[-1] != group:
                table.add_section()
            groups.append(group)
            cells = (
                ("–" if figures.get(key) is None else form.format(figures[key])) for key, form in columns.values()
            )
            table.add_row(name, *cells)

        with Live(table, console=self._console, refresh_per_second=2):
            yield add
        self._console.print()  # a file gets the table without an end of line
        for line in failures:
            self.say(line)

    def picture(self, panels: Mapping[str, Mapping[str, float | None]], title: str) -> None:
        """Write the picture, if one was asked for: a panel of bars for each list or shape."""
        if self._figure is not None:
            # Drawing needs matplotlib, which takes longer to import than everything else here.
            from narrowgauge.cli._charts import bar_panels, save_figure

            write_output("--figure", self._figure, save_figure(bar_panels(panels, title), self._figure))
            self.say(str(self._figure))
