"""The table of times, as it grows."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from narrowgauge.cli._bench._lists import ParameterList
from narrowgauge.cli._bench._rows import Row

_WIDE = 120  # columns from which on there is room for all
_EXPLAINED = """\
B: bytes a parameter, kept in the optimizer's state, and moved: what a step has to read and write.
limit: the time of a copy of what is moved; a small list stays in a cache and may pass it.
"""


class Table:
    """Prints a table for each list of tensors; a row appears when it has been measured."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._console = Console()
        self._wide = self._console.width >= _WIDE
        self._live: Live | None = None
        self._table = RichTable()
        self._failed: list[str] = []
        environment, speed = results["environment"], results["copy_bytes_per_second"]
        self._console.print(f"{environment['device']}, torch {environment['torch']}")
        self._console.print(f"Copies at {speed / 1e9:,.1f} GB/s, reads and writes counted.")

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if kind is None:
            self._console.print(_EXPLAINED, end="")

    def begin(self, of: ParameterList) -> None:
        """Start the table of a list."""
        self._end()
        counts = of.counts()
        title = f"{of.title}: {counts['tensors']:,} tensors, {counts['parameters']:,} parameters"
        self._table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        self._table.add_column("optimizer", no_wrap=True)
        if self._wide:
            self._table.add_column("what is kept")
        for column in ("state B", *(["moved B"] if self._wide else []), "ms", "ms / 10⁹", "of limit", "first"):
            self._table.add_column(column, justify="right", no_wrap=True)
        self._live = Live(self._table, console=self._console, refresh_per_second=2)
        self._live.start()

    def add(self, row: Row, figures: dict[str, Any]) -> None:
        """A row's figures."""
        if "failed" in figures:
            self._failed.append(f"{row.name}: {figures['failed']}")
            return
        moved = [row.what, f"{figures['state_bytes']:.2f}", f"{figures['moved_bytes']:.2f}"]
        self._table.add_row(
            row.name, *(moved if self._wide else moved[1:2]), _short(figures["ms"]), _short(figures["ms_per_1e9"]),
            f"{100 * figures['share']:.1f} %", f"{figures['first_step_seconds']:.2f} s",
        )  # fmt: skip

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.print()  # a file gets the table without an end of line
        for line in self._failed:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._failed.clear()


def _short(ms: float) -> str:
    return f"{ms:.3f}" if ms < 100 else f"{ms:,.0f}"
