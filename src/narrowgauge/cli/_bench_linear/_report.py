"""What `narrowgauge bench linear` prints: a table for each shape, dim or cell as soon as it has been measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from narrowgauge.cli._bench_linear._operations import OPERATIONS
from narrowgauge.cli._bench_linear._sizes import Shape

Figures = Mapping[str, Any]
_EXPLAINED = {
    "shapes": "forward and backward; ×: times as fast as nn.Linear",
    "memory": "held until the backward pass: B of a token and feature, B of a weight",
    "noise": "signal to noise against float64, dB",
    "operations": "ms of each operation alone, mean of dim to 4 dim and back",
    "grid": "forward and backward of dim to 4 dim and back",
}
_EXPLAINED_GPU = "graph: the device's work alone, replayed; host: how long the host is busy with a pass."


class Report:
    """Prints rows as they come, under what was measured."""

    def __init__(self, environment: Mapping[str, str], dtype: str, device: torch.device) -> None:
        self._console = Console()
        self._gpu = device.type == "cuda"
        self._section = ""
        self._console.print(f"{environment['device']}, torch {environment['torch']}, {dtype}", highlight=False)

    def show(self, section: str, name: str, rows: Mapping[str, Figures]) -> None:
        """A table of rows, and in lines below it what failed."""
        if section != self._section:
            self._section = section
            self._console.print(f"\n{section}: {_EXPLAINED[section]}", highlight=False, soft_wrap=True)
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0))
        table.add_column("layer", no_wrap=True)
        columns = self._columns(section, rows)
        for title in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for layer, row in rows.items():
            if "failed" not in row:
                table.add_row(layer, *(cell(row) for cell in columns.values()))
        self._console.print(table)
        for layer, row in rows.items():
            for what in ("failed", "graph_failed"):
                if what in row:
                    self._line(f"{layer}: {what}: {row[what]}")

    def tuned(self, shape: Shape, layer: str, found: Figures) -> None:
        """What a multiply takes from now on."""
        if "failed" in found:
            self._line(f"{shape} {layer}: tuning failed: {found['failed']}")
            return
        taken = (f"{name} {of['way']} ({of['ms']:.3f} ms)" for name, of in found.items() if name != "seconds")
        self._line(f"{shape} {layer}: {'; '.join(taken)} [{found['seconds']:.0f} s]")

    def end(self) -> None:
        """Say what columns mean."""
        if self._gpu:
            self._line(_EXPLAINED_GPU)

    def _columns(self, section: str, rows: Mapping[str, Figures]) -> dict[str, Callable[[Figures], str]]:
        if section in ("shapes", "grid"):
            times = {"ms": _number("ms", "{:.3f}"), "×": _number("speedup", "{:.2f}")}
            if section == "shapes" and self._gpu:
                times |= {"host ms": _number("host_ms", "{:.3f}"), "graph ms": _number("graph_ms", "{:.3f}")}
                times |= {"graph ×": _number("graph_speedup", "{:.2f}")}
            if section == "shapes":
                times |= {"first s": _number("first_seconds", "{:.2f}")}
            return times
        if section == "memory":
            return {
                "B / token feature": _number("bytes_per_token_feature", "{:.3f}"),
                "B / weight": _number("bytes_per_weight", "{:.3f}"),
                "saving": _number("saving", "{:.1%}"),
            }
        if section == "noise":
            return {name: _number(name, "{:.1f}") for name in ("output", "grad_input", "grad_weight")}
        return {"ms": lambda row: _compact(row["ms"]), "quant.": _number("quantize_share", "{:.0%}")} | {
            _SHORT.get(name, name): _operation(name) for name in _operations_of(rows)
        }

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


# Eight columns of milliseconds in 80 characters.
_SHORT = {
    "output": "Y", "grad_input": "dX", "grad_weight": "dW", "bias": "db",
    "quantize X": "qX", "quantize W": "qW", "quantize G": "qG", "dequantize": "deq",
}  # fmt: skip


def _operations_of(rows: Mapping[str, Figures]) -> list[str]:
    seen = [name for row in rows.values() for name in row.get("operations", ())]
    return [*(name for name in OPERATIONS if name in seen), *dict.fromkeys(n for n in seen if n not in OPERATIONS)]


def _number(key: str, style: str) -> Callable[[Figures], str]:
    return lambda row: style.format(row[key]) if key in row else "–"


def _operation(name: str) -> Callable[[Figures], str]:
    return lambda row: _compact(row["operations"][name]) if name in row["operations"] else "–"


def _compact(ms: float) -> str:
    """Milliseconds in four characters."""
    return f"{ms:.2f}" if ms < 9.995 else f"{ms:.1f}" if ms < 99.95 else f"{ms:.0f}"
