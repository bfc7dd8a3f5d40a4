"""The table of times, as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
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
_EXPLAINED_GPU = """\
host ms: how long a step keeps the host; extra B: memory that a step takes and gives back.
"""


class Table:
    """Prints a table for each list of tensors; a row appears when it has been measured."""

    def __init__(self, results: dict[str, Any], device: torch.device) -> None:
        self._console = Console()
        self._wide = self._console.width >= _WIDE
        self._gpu = device.type == "cuda"
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
            self._console.print(_EXPLAINED + self._gpu * _EXPLAINED_GPU, end="")

    def not_installed(self, packages: Sequence[str]) -> None:
        """Say which packages' rows are missing."""
        if packages:
            self._console.print(f"Not installed: {', '.join(packages)}.")

    def begin(self, of: ParameterList) -> None:
        """Start the table of a list."""
        self._end()
        counts = of.counts()
        title = f"{of.title}: {counts['tensors']:,} tensors, {counts['parameters']:,} parameters"
        self._table = RichTable(
            title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
        )
        self._group: str | None = None
        self._table.add_column("optimizer", no_wrap=True)
        if self._wide:
            self._table.add_column("what is kept")
        for column in self._columns():
            self._table.add_column(column, justify="right", no_wrap=True)
        self._live = Live(self._table, console=self._console, refresh_per_second=2)
        self._live.start()

    def add(self, row: Row, figures: dict[str, Any]) -> None:
        """A row's figures."""
        if "failed" in figures:
            self._failed.append(f"{row.name}: {figures['failed']}")
            return
        if self._group not in (None, row.group):
            self._table.add_section()
        self._group = row.group
        self._table.add_row(row.name, *([row.what] if self._wide else []), *self._columns(figures).values())

    def _columns(self, figures: dict[str, Any] | None = None) -> dict[str, str]:
        """What a row shows behind its name, under the columns' titles."""
        known = figures or {}
        bytes_of = {name: f"{known.get(f'{name}_bytes') or 0:.2f}" for name in ("state", "moved", "peak_extra")}
        first = known.get("first_step_seconds", 0.0)
        columns = {
            "state B": bytes_of["state"],
            "moved B": bytes_of["moved"],
            "extra B": bytes_of["peak_extra"],
            "ms": _short(known.get("ms", 0.0)),
            "ms / 10⁹": _short(known.get("ms_per_1e9", 0.0)),
            "of limit": f"{100 * known.get('share', 0.0):.1f} %",
            "host ms": _short(known.get("host_ms", 0.0)),
            "device ms": _short(known["device_ms"]) if known.get("device_ms") is not None else "–",
            "first": f"{first:.2f} s",
        }
        left_out = set() if self._gpu else {"extra B", "host ms", "device ms"}
        if not self._wide:
            left_out |= {"moved B", "extra B", "ms", "device ms"} if self._gpu else {"moved B"}
        return {title: text for title, text in columns.items() if title not in left_out}

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
