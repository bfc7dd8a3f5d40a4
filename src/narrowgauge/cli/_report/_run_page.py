"""`narrowgauge report RUN`: what the gauges of a run recorded, as one page that needs nothing but itself.

Advice comes first, in words and with the numbers that led to it; figures come after, each with its numbers as a
table. What was not recorded is named and left out. A file that is damaged is read up to the damage, and the page
says so before anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from narrowgauge._files import write_whole
from narrowgauge._text import listed
from narrowgauge.cli._report._page import Figure, Table, number, render
from narrowgauge.cli._report._run_figures import (
    STEPS,
    features,
    formats,
    loss,
    loss_scale,
    lost,
    maps,
    quality,
    usage,
)
from narrowgauge.gauges._advice import advise
from narrowgauge.gauges._history import History, Record, as_number
from narrowgauge.gauges._records import MISSED
from narrowgauge.gauges._spike_matching import find_precursors

# In the order of the page. Neighbors are of about the same height: they stand side by side.
MAKERS: tuple[Callable[[History], Figure | str], ...] = (
    loss,
    quality,
    lost,
    formats("gradient", "gradients"),
    formats("activation", "activations"),
    formats("activation_gradient", "gradients of activations"),
    features,
    loss_scale,
    maps,
    usage,
)
# How the page calls what advice calls by a word.
WORDS = {"change": "to change", "watch": "to watch", "note": "to know"}


def write_run_report(records: Iterable[Record], path: Path, name: str) -> None:
    """Write the page of a run, whole or not at all.

    Args:
        records: as `read_records` or a watch's `rows()` gives them; if they have a `damage`, the page says so.
        path: the file to write, in a folder that exists.
        name: what the page calls the run.
    """
    write_whole(path, page(History(records, getattr(records, "damage", None)), name))


def page(history: History, name: str) -> str:
    """The page as text."""
    made = [make(history) for make in MAKERS]
    advice = advise(history)
    return render(
        "run.html.j2",
        name=name,
        made=_made(history),
        alarms=_alarms(history),
        summary=" ".join(_summary(history, [piece.urgency for piece in advice])),
        advice=advice,
        words=WORDS,
        figures=[figure for figure in made if isinstance(figure, Figure)],
        missing=[*(why for why in made if isinstance(why, str)), *_unseen(history)],
        facts=_facts(history),
        raised=_raised(history),
        adapted=_adapted(history),
    )


def _unseen(history: History) -> Iterable[str]:
    """Sentences on what the run itself said that it could not record."""
    for (kind, why), names in history.missing.items():
        if names:  # that there is no loss is in the summary
            yield f"No {MISSED.get(kind, kind)} were recorded of {listed(names)}: {why}."


def _made(history: History) -> str:
    header = history.header
    parts = [header.get("optimizer"), header.get("device"), _stamp(header.get("started"))]
    return ", ".join(str(part) for part in parts if part)


def _stamp(started: object) -> str:
    return str(started).replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC") if started else ""


def _alarms(history: History) -> list[tuple[str, str]]:
    found = []
    if history.damage:
        found.append(("The records end early.", f"{history.damage}. The page shows what stands before."))
    if not history.header and history.count:
        found.append(("The header is missing.", "Optimizer and parameters of the run are not known."))
    if history.ignored:
        found.append(("Some records were not read.", f"{history.ignored:,} have no step, no name or no map."))
    if not history.count:
        found.append(("There are no records.", "Nothing was written before the run ended."))
    return found


def _summary(history: History, urgencies: list[str]) -> Iterable[str]:
    """Sentences: how long, how the loss went, how many spikes, how much there is to change."""
    if not history.last_step:
        yield "No step was recorded."
        return
    series = history.loss
    yield f"{history.last_step:,} steps were watched, with {history.count:,} records."
    if len(series.steps):
        first, last = float(series.values[0]), float(series.values[-1])
        yield f"The loss went from {number(first)} to {number(last)}."
        spikes = find_precursors(history)
        if spikes.loss:
            within = f", {len(spikes.within)} with one within" if spikes.within else ""
            many = _many(len(spikes.loss), "loss spike")
            yield f"{many}, {len(spikes.matched)} of them after an RMS spike{within}."
    else:
        yield from (f"No loss was recorded: {why}." for kind, why in history.missing if kind == "loss")
    if history.adapted:
        yield f"{_many(len(history.adapted), 'change')} of precision while training."
    said = [f"{urgencies.count(kind)} {WORDS[kind]}" for kind in WORDS if kind in urgencies]
    yield f"Advice: {listed(said, len(said))}." if said else "No gauge crossed a threshold."


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count:,} {what}s"


def _facts(history: History) -> list[tuple[str, str]]:
    header, shapes = history.header, history.parameters
    sizes = [
        math.prod(side for side in shape if isinstance(side, int)) if isinstance(shape, list) else 1
        for shape in shapes.values()
    ]
    facts = {
        "Optimizer": header.get("optimizer"),
        "Device": header.get("device"),
        "Measured every": f"{header['every']} steps" if as_number(header.get("every")) else None,
        "Tensors": f"{len(shapes):,}" if shapes else None,
        "Parameters": f"{sum(sizes):,}" if shapes else None,
        "torch": header.get("torch"),
        "narrowgauge": header.get("narrowgauge"),
        "Started": _stamp(header.get("started")),
        "Resumed": f"{history.runs - 1} times" if history.runs > 1 else None,
    }
    return [(key, str(value)) for key, value in facts.items() if value]


def _raised(history: History) -> Table:
    rows = [
        [f"{int(as_number(alarm.get('step')) or 0):,}", str(alarm.get("of", "")), str(alarm.get("name", "")),
         number(as_number(alarm.get("value"))), number(as_number(alarm.get("threshold")))]
        for alarm in history.alarms[:STEPS]
    ]  # fmt: skip
    more = len(history.alarms) - len(rows)
    remark = f"{more:,} more are left out." if more else ""
    return Table(["Step", "Of", "Tensor", "Value", "Threshold"], rows, remark)


def _adapted(history: History) -> Table:
    rows = [
        [f"{int(as_number(one.get('step')) or 0):,}", str(one.get("name", "")), str(one.get("of", "")),
         f"{one.get('was', '')} → {one.get('becomes', '')}", number(as_number(one.get("quality")))]
        for one in history.adapted[:STEPS]
    ]  # fmt: skip
    more = len(history.adapted) - len(rows)
    remark = f"{more:,} more are left out." if more else ""
    return Table(["Step", "Tensor or layer", "Of", "Widened", "Quality before"], rows, remark)
