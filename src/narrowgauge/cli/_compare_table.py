"""What a person sees while a comparison runs, and the table at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from narrowgauge.cli._console import Display
from narrowgauge.trainers import Run


class CompareDisplay(Display):
    """Progress bars on a terminal, one line a run elsewhere; then the table."""

    def __init__(self) -> None:
        """No run has begun."""
        super().__init__()
        self._all: TaskID | None = None
        self._run: TaskID | None = None
        self._steps = self._tokens = self._finished = 0
        self._started = 0.0

    def plan(self, runs: int, steps: int, tokens: int) -> None:
        """Announce how much training lies ahead: runs, steps a run, tokens a step."""
        self.hide_stages()
        self._steps, self._tokens = steps, tokens
        self._all = self.add("all runs", runs * steps)

    def begin(self, name: str, seed: int) -> None:
        """A run starts."""
        if self._run is not None:
            self.bars.update(self._run, visible=False)
        self._run = self.add(f"{name}, seed {seed}", self._steps)
        self._started = self.bars.get_time()

    def step(self, number: int, loss: float) -> None:
        """A step is done."""
        assert self._run is not None
        assert self._all is not None
        seconds = max(1e-9, self.bars.get_time() - self._started)
        note = f"loss {loss:.3f}, {number * self._tokens / seconds:,.0f} tokens/s"
        self.bars.update(self._run, completed=number, note=note)
        self.bars.update(self._all, completed=self._finished * self._steps + number)

    def finish(self, name: str, run: Run) -> None:
        """A run is done; it leaves a line."""
        assert self._all is not None
        self._finished += 1
        self.bars.update(self._all, completed=self._finished * self._steps)
        if run.validation_loss is None:
            outcome = f"diverged at step {len(run.loss)}"
        else:
            outcome = f"validation loss {run.validation_loss:.4f}"
        self.say(f"{name}, seed {run.seed}: {outcome}")

    def table(self, results: dict[str, Any]) -> None:
        """The comparison as a table, with a line that says how to read it."""
        with contextlib.suppress(OSError):
            self.console.print()
            for table in _tables(results, self.console.width):
                self.console.print(table)
                self.console.print()
            self.console.print(Text(_legend(results), style="dim"))


# Above this the table is one; below, numbers would be cut, so costs get a table of their own.
_WIDE = 140


def _tables(results: dict[str, Any], width: int) -> list[Table]:
    """One table, or two on a narrow terminal: what each recipe reached, and what it cost."""
    reference = results["reference"]
    rows = results["recipes"]
    reached = {
        "validation\nloss": lambda row: _loss(row),
        "perplex-\nity": lambda row: _number(row["perplexity"], 2),
        f"minus {reference}" if reference else "difference": lambda row: (
            "(reference)" if reference and row is rows[reference] else _difference(row["difference"])
        ),
        "EDQ\n%": lambda row: _number(row["edq"], 1, 100),
        "lost\n%": lambda row: _number(row["lost_updates"], 1, 100),
    }
    cost = {
        "bytes/param\nplanned": lambda row: _number(row["bytes_per_parameter"], 2),
        "\nmeasured": lambda row: _number((row["bytes"]["measured"] or {}).get("total"), 2),
        "peak\nMiB": lambda row: _number(row["peak_memory_bytes"], 1, 2.0**-20),
        "optimizer\nms": lambda row: _number(row["optimizer_ms"], 1),
        "step\nms": lambda row: _number(row["step_ms"], 1),
    }
    parts = [reached | cost] if width >= _WIDE else [reached, cost]
    return [_table(rows, columns) for columns in parts]


def _table(rows: dict[str, Any], columns: dict[str, Callable[[dict[str, Any]], str]]) -> Table:
    # Rich pads columns by two; one leaves room for every digit at 80 characters.
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("recipe", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(Text(name), *(read(row) for read in columns.values()))
    return table


def _loss(row: dict[str, Any]) -> str:
    return "diverged" if row["diverged"] else _with_spread(row["validation_loss"], row["validation_loss_spread"])


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"


def _with_spread(value: float | None, spread: float | None) -> str:
    return _number(value, 4) + ("" if spread is None else f" ± {spread:.4f}")


def _difference(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "–"
    text = f"{difference['mean']:+.5f}"
    if difference["spread"] is None:
        return text
    mark = " ~" if difference["within_spread"] else " ≈" if difference["within_reference_spread"] else ""
    return f"{text} ± {difference['spread']:.5f}{mark}"


def _legend(results: dict[str, Any]) -> str:
    lines = [
        "EDQ: how far what is stored moved along the intended update (100%: nothing is missing along it). Lost "
        "updates: intended changes that left what is stored as it was."
    ]
    seeds = max(len(row["seeds"]) for row in results["recipes"].values())
    if seeds > 1:
        lines.append(
            "±: standard deviation over seeds, of the loss and of the paired difference. ~ marks one within "
            f"its own spread, ≈ one within the spread of {results['reference']}'s loss."
        )
    else:
        lines.append("One seed: differences have no spread to be compared with (--seeds 3 gives one).")
    lines += [
        f"{name}: {row['title']}" for name, row in results["recipes"].items() if "computed in" in row["title"]
    ]
    if results["interrupted"]:
        lines.append("Interrupted: runs that were not complete are missing.")
    return "\n".join(lines)
