"""The terminal: where commands print, tables of numbers, progress bars, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

MISSING = "-"  # stands in a table where there is no value
STAGES = {"tokenizer": "learning the tokenizer", "tokens": "encoding the text"}


class _PatientConsole(Console):
    """A console that goes quiet when its pipe is closed, where rich would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What Python still holds for the pipe must not fail at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def make_console() -> Console:
    """Where a command prints to."""
    # A pipe or a log has no width of its own, and a table folded at 80 columns cannot be read.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150
    return _PatientConsole(width=width, highlight=False)


def complain(text: str) -> None:
    """A line on stderr, where errors go."""
    print(f"narrowgauge: {text}", file=sys.stderr)


@contextlib.contextmanager
def asked_to_stop(say: Callable[[str], None], answer: str) -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C or SIGTERM came; a second one ends at once.

    Python drops a KeyboardInterrupt that reaches it inside a finalizer; a list keeps it.

    Args:
        say: prints a line.
        answer: what to print at the first one.
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        say(f"{answer}; once more to stop at once")

    before: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # signals reach the main thread only
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, ask)
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Display:
    """Progress bars on a terminal, nothing of them elsewhere; lines of text on both."""

    def __init__(self) -> None:
        """Nothing is shown before the display is entered."""
        self.console = make_console()
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        """A line of plain text, above the bars."""
        # A terminal that went away, a full disk after a pipe: no reason to stop training.
        with contextlib.suppress(OSError):
            self.console.print(text, markup=False, soft_wrap=True)
            sys.stdout.flush()

    def stage(self, stage: str, fraction: float) -> None:
        """Progress of preparing the data, 0 to 1."""
        if stage not in self._stages:
            self._stages[stage] = self.add(STAGES.get(stage, stage), 1.0)
        self.bars.update(self._stages[stage], completed=fraction)

    def hide_stages(self) -> None:
        """The data is prepared."""
        for task in self._stages.values():
            self.bars.update(task, visible=False)

    def add(self, name: str, total: float, completed: float = 0) -> TaskID:
        """A new bar."""
        return self.bars.add_task(name, total=total, completed=int(completed), note="")


class Printer:
    """Paragraphs and tables, a blank line between them."""

    def __init__(self) -> None:
        # A pipe or a log has no width of its own; what is printed is made for 80 columns.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 80
        self._console = Console(width=width, highlight=False, markup=False, emoji=False)
        self._begun = False

    def say(self, text: str, style: str | None = None) -> None:
        """A paragraph; lines are folded between words, and long words stay whole."""
        if self._begun:
            self._console.print()
        self._console.print(text, style=style)
        self._begun = True

    def line(self, text: str) -> None:
        """A line that is not folded, such as a path to copy."""
        self._console.print(text, soft_wrap=True)

    def title(self, text: str) -> None:
        """A heading: the table or paragraph after it follows directly."""
        self.say(text, style="bold")
        self._begun = False

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        left: Sequence[str] = (),
        gap: int = 2,
        indent: int = 0,
    ) -> None:
        """A table without lines.

        Args:
            columns: their headings; with none at all the table has no heading.
            rows: their cells.
            left: headings of columns to align left; the first is in any case, the others hold numbers.
            gap: spaces between columns.
            indent: spaces before the first.
        """
        if self._begun:
            self._console.print()
        table = Table(
            box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0), show_header=any(columns)
        )
        for index, name in enumerate(columns):
            text = index == 0 or name in left or not any(columns)
            table.add_column(name, justify="left" if text else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(Padding(table, (0, 0, 0, indent), expand=False))
        self._begun = True
