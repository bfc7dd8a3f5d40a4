"""`narrowgauge watch RUN`: a page in the terminal that follows a training, or a line for each of several.

It reads the files that trainings write and touches nothing else, so it may come and go as it likes. Every look
takes what is new; advice is worked out anew when there is something new, and more rarely where that takes long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from narrowgauge.cli._files import UsageError
from narrowgauge.cli._options import WatchOptions
from narrowgauge.cli._report._page import MISSING, number
from narrowgauge.cli._runs import Followed, others
from narrowgauge.gauges._advice import Advice, advise
from narrowgauge.gauges._history import Floats, History, LiveReader, as_number
from narrowgauge.gauges._rules import SKIPPED
from narrowgauge.gauges._spike_matching import RMS_THRESHOLD

_BARS = " ▁▂▃▄▅▆▇█"
_STYLES = {"change": "bold red", "watch": "yellow", "note": "dim"}
# How many tensors, alarms and pieces of advice fit beside each other on a small terminal.
TENSORS, ALARMS, ADVICE = 6, 3, 3
# Advice may take this share of the time at most.
ADVICE_SHARE = 0.1


def watch(options: WatchOptions, console: Console | None = None, rounds: int | None = None) -> int:
    """Show the page until Ctrl-C, or once.

    Args:
        options: what the user asked for.
        console: where to; the terminal by default.
        rounds: how many looks to take; without end by default.
    """
    if not options.interval > 0:
        raise UsageError(f"--interval must be above 0 seconds, got {options.interval:g}")
    console = console or Console(highlight=False)
    runs, advisor = [Followed(path) for path in options.runs], Advisor()
    for run in runs:
        run.read()
    # Into a pipe there is one page: what follows could not be drawn over it.
    if options.once or not console.is_terminal:
        for run in runs:
            _refuse_without_records(run)
        console.print(_shown(runs, advisor, console.width))
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # how one leaves
        _follow(options, console, runs, advisor, rounds)
    return 0


def _refuse_without_records(run: Followed) -> None:
    history = run.reader.history
    if run.results is None and not history.count:
        why = f"there are no records{others(run.path)}"
        if run.reader.exists:
            why = history.damage or "there is no whole record in it yet"
        raise UsageError(f"RUN must have records, got {str(run.path)!r}: {why}")


def _follow(
    options: WatchOptions, console: Console, runs: list[Followed], advisor: Advisor, rounds: int | None
) -> None:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(_shown(runs, advisor, console.width), refresh=True)
            if rounds is not None and (rounds := rounds - 1) <= 0:
                return
            time.sleep(options.interval)
            for run in runs:
                run.read()


def _shown(runs: list[Followed], advisor: Advisor, width: int) -> RenderableType:
    """The page of a run with records, or a table of all."""
    (run, *others) = runs
    if others or run.results is not None:
        return side_by_side(runs, width)
    return page(run.path, run.reader, advisor.of(run.reader.history), width)


def side_by_side(runs: list[Followed], width: int) -> RenderableType:
    """A line for each run: its last numbers, and how its loss went."""
    bars = 12 if width >= 100 else 0
    columns = ["step", "steps/s", "loss", *[""] * bool(bars), "EDQ %", "lost %", "RMS_t", "alarms"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=max(12, width - 56 - bars))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[RenderableType] = []
    for run in runs:
        if run.results is not None:
            table.add_row(Text(str(run.path), style="bold"))
        for name, history in run.histories.items():
            losses = history.loss.values
            cells = [f"{history.last_step:,}", _speed(history) or MISSING, _last(history, "step", "loss")]
            cells += [sparkline(losses, bars) if len(losses) else ""] * bool(bars)
            cells += [_last(history, "update", "descent_quality", 100), _last(history, "update", "lost", 100)]
            cells += [_last(history, "update", "rms"), f"{len(history.alarms):,}"]
            table.add_row(Text(name if run.results is None else f"  {name}"), *cells)
            if history.damage:
                notes.append(Text(f"{name}: read up to a damage: {history.damage}", style="bold red"))
        if run.results is None and not run.reader.exists:
            notes.append(Text(f"{run.path}: waiting for the file{others(run.path)}", style="yellow"))
        elif run.results is not None and run.results["interrupted"]:
            stopped = run.results.get("stopped")
            said = "interrupted before its end" if stopped else "not complete; runs appear when they are done"
            notes.append(Text(f"{run.path}: {said}", style="yellow"))
    return Group(table, *notes)


def _last(history: History, kind: str, key: str, scale: float = 1.0) -> str:
    values = history.series(kind, key).values
    return number(float(values[-1]) * scale if len(values) else None)


def _speed(history: History) -> str | None:
    """Steps a second, by the median of the last 50."""
    seconds = history.series("step", "seconds").finite.values[-50:]
    middle = float(np.median(seconds)) if len(seconds) else 0.0
    return f"{1 / middle:.3g}" if middle > 0 else None


class Advisor:
    """Advice on a growing history, worked out for a small share of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self._next = -float("inf")
        self._advice: list[Advice] = []

    def of(self, history: History) -> list[Advice]:
        """Advice on what was read so far, or a little before."""
        now, seen = self._clock(), (id(history), history.count)
        if seen != self._seen and now >= self._next:
            self._advice, self._seen = advise(history), seen
            end = self._clock()
            self._next = end + (end - now) / ADVICE_SHARE
        return self._advice


def page(run: Path, reader: LiveReader, advice: list[Advice], width: int) -> RenderableType:
    """The page of a run as it stands."""
    history = reader.history
    parts: list[RenderableType] = [_head(run, history)]
    if not reader.exists:
        parts.append(Text(f"waiting for the file{others(run)}", style="yellow"))
    elif not history.count and not history.damage:
        parts.append(Text("waiting for the first record", style="yellow"))
    if history.damage:
        parts.append(Text(f"read up to a damage: {history.damage}", style="bold red"))
    if not len(history.loss.steps):
        parts += [Text(f"no loss: {why}", style="yellow") for kind, why in history.missing if kind == "loss"]
    if history.count:
        parts += [_whole(history, width), *_tensors(history, width), *_alarms(history)]
    for piece in advice[:ADVICE]:
        parts.append(Text(f"{piece.rule}: {piece.finding} {piece.action}", style=_STYLES[piece.urgency]))
    if len(advice) > ADVICE:
        parts.append(Text(f"and {len(advice) - ADVICE} more: narrowgauge report", style="dim"))
    return Group(*parts)


def _head(run: Path, history: History) -> Text:
    header = history.header
    parts = [
        header.get("optimizer"),
        header.get("device"),
        f"step {history.last_step:,}" if history.last_step else None,
    ]
    if (speed := _speed(history)) is not None:
        parts.append(f"{speed} steps/s")
    return Text.assemble((str(run), "bold"), "\n", ", ".join(str(part) for part in parts if part))


def _whole(history: History, width: int) -> Table:
    """Numbers of the whole model: name, last value, and how it went."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    rows = {
        "loss": ("step", "loss", 1.0),
        "loss scale": ("step", "loss_scale", 1.0),
        "EDQ %": ("update", "descent_quality", 100.0),
        "lost updates %": ("update", "lost", 100.0),
        "RMS_t": ("update", "rms", 1.0),
    }
    for name, (kind, key, scale) in rows.items():
        series = history.series(kind, key)
        if len(series.steps):
            last = float(series.values[-1]) * scale
            style = "" if np.isfinite(last) else "bold red"
            table.add_row(name, Text(number(last), style=style), sparkline(series.values, max(8, width - 32)))
    return table


def _tensors(history: History, width: int) -> list[RenderableType]:
    """The tensors that are worst off, with their last numbers."""
    numbers: dict[str, dict[str, float]] = {}
    for key, kind, column in (
        ("rms", "update", "RMS_t"), ("descent_quality", "update", "EDQ %"), ("lost", "update", "lost %"),
        ("nonfinite", "gradient", "inf, NaN"),
    ):  # fmt: skip
        for name in history.names(kind):
            series = history.series(kind, key, name)
            if len(series.steps):
                numbers.setdefault(name, {})[column] = float(series.values[-1])
    if not numbers:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worst tensors", no_wrap=True, max_width=max(16, width - 44))
    columns = ("RMS_t", "EDQ %", "lost %", "inf, NaN")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name in sorted(numbers, key=lambda n: (-_badness(numbers[n]), n))[:TENSORS]:
        cells = []
        for column in columns:
            value = numbers[name].get(column)
            cells.append(number(None if value is None else value * (100 if "%" in column else 1)))
        table.add_row(Text(name, overflow="ellipsis"), *cells)
    return [Text(), table, Text()]


def _badness(values: dict[str, float]) -> float:
    """How much is wrong: anything not finite first, then shares of updates off, then RMS_t by its threshold."""
    if values.get("inf, NaN", 0) or not all(map(np.isfinite, values.values())):
        return np.inf
    off = abs(1 - values.get("EDQ %", 1.0))
    return float(max(off, values.get("RMS_t", 0.0) / RMS_THRESHOLD if "RMS_t" in values else 0.0))


def _alarms(history: History) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for alarm in history.alarms[-ALARMS:]:
        if alarm.get("kind") == "lost":
            said = f"step {alarm.get('step')}: every update of {alarm.get('name', '')} is lost"
            lines.append(Text(said, style="yellow"))
            continue
        if alarm.get("of") == SKIPPED:
            said = f"after {number(as_number(alarm.get('taken')))} steps: the scaler skipped"
            lines.append(Text(f"{said} {number(as_number(alarm.get('value')))} in a row", style="yellow"))
            continue
        what = "inf or NaN in" if alarm.get("kind") == "nonfinite" else "spike of"
        where = " ".join(str(alarm.get(key, "")) for key in ("of", "name")).strip()
        value = number(as_number(alarm.get("value")))
        lines.append(Text(f"step {alarm.get('step')}: {what} {where}, {value}", style="yellow"))
    return lines


def sparkline(values: Floats, width: int) -> str:
    """A curve in one line of bars, the mean of each stretch; ! where one has what is not finite."""
    stretches = np.array_split(values, min(len(values), max(width, 1)))
    means = [float(np.mean(part)) if np.isfinite(part).all() else np.nan for part in stretches]
    finite = [value for value in means if np.isfinite(value)]
    if not finite:
        return "!" * len(means)
    low, span = min(finite), max(finite) - min(finite)

    def bar(value: float) -> str:
        if not np.isfinite(value):
            return "!"
        return _BARS[4] if span == 0 else _BARS[1 + round((value - low) / span * (len(_BARS) - 2))]

    return "".join(map(bar, means))
