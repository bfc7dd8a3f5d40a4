"""`narrowgauge report RUN RUN ...`: several runs on one page, their last numbers as a table, their curves together.

Curves are of the whole model. What is told of its tensors stands on the page of each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from narrowgauge._text import listed
from narrowgauge.cli._charts import LineStyle, line_styles, page_figure, thin
from narrowgauge.cli._report._page import MISSING, Figure, Table, number, render
from narrowgauge.cli._report._run_drawing import curve, settle
from narrowgauge.cli._report._run_figures import STEPS
from narrowgauge.cli._report._run_page import WORDS
from narrowgauge.gauges._advice import advise
from narrowgauge.gauges._history import History, Series
from narrowgauge.gauges._spike_matching import find_precursors

Runs = Mapping[str, History]

# What is drawn: title, name of the figure, its series, factor, and how to read it.
CURVES: tuple[tuple[str, str, Callable[[History], Series], float, str], ...] = (
    (
        "Training loss", "loss", lambda history: history.loss, 1.0,
        "Strong as a running median, faint as measured. A purple cross is a value that is not finite.",
    ),
    (
        "Effective descent quality, %", "quality", lambda history: history.series("update", "descent_quality"),
        100.0,
        "How far what is stored moved along the intended update, relative to its length (Collage, Definition 3.3). "
        "At 100 nothing is missing.",
    ),
    (
        "Lost updates, %", "lost", lambda history: history.series("update", "lost"), 100.0,
        "Share of the weights for which the intended change is not zero and what is stored does not change "
        "(Collage, Definition 3.2).",
    ),
    (
        "RMS_t", "rms", lambda history: history.series("update", "rms"), 1.0,
        "Near 1 while the second moment follows the gradient (SwitchBack, Section 3.4).",
    ),
)  # fmt: skip


def page(runs: Runs) -> str:
    """The page of several runs, by name, as text."""
    looks = line_styles(runs)
    made = [_figure(runs, looks, *each) for each in CURVES]
    return render(
        "runs.html.j2",
        alarms=[("The records end early.", f"{name}: {h.damage}.") for name, h in runs.items() if h.damage],
        summary=" ".join(_summary(runs)),
        table=_table(runs),
        looks=looks,
        advice=[(name, piece, WORDS[piece.urgency]) for name, h in runs.items() for piece in advise(h)],
        figures=[figure for figure in made if isinstance(figure, Figure)],
        missing=[why for why in made if isinstance(why, str)],
    )


def last(series: Series) -> float | None:
    """The median of the last tenth of the finite values."""
    values = series.finite.values
    return float(np.median(values[-max(1, len(values) // 10) :])) if len(values) else None


def _figure(
    runs: Runs, looks: dict[str, LineStyle], title: str, name: str, of: Callable[[History], Series], scale: float,
    caption: str,
) -> Figure | str:  # fmt: skip
    found = {run: of(history) for run, history in runs.items()}
    found = {run: Series(s.steps, s.values * scale) for run, s in found.items() if len(s.steps)}
    if not found:
        return f"{title}: recorded in none of the runs."
    with page_figure(name, f"{title}, of each run", 320) as drawn:
        for run, series in found.items():
            curve(drawn.axes, series, looks[run], smoothed=True)
        last_step = max(int(series.steps[-1]) for series in found.values())
        settle(drawn.axes, "", last_step, room=1.0 if scale == 100 else 0.0)
    without = [run for run in runs if run not in found]
    if without:
        caption += f" Not recorded: {listed(without)}."
    return Figure(title, drawn.svg, caption, [_steps(found)], {run: looks[run] for run in found})


def _steps(columns: dict[str, Series]) -> Table:
    """The curves at some steps."""
    steps = np.unique(np.concatenate([series.steps for series in columns.values()]))
    kept = steps[thin(len(steps), STEPS)]
    at = [dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for s in columns.values()]
    rows = [[f"{step:,}", *(number(values.get(step)) for values in at)] for step in kept.tolist()]
    return Table(
        ["Step", *columns], rows, f"{len(kept)} of {len(steps):,} steps." if len(kept) < len(steps) else ""
    )


def _summary(runs: Runs) -> Iterable[str]:
    ends = {name: value for name, history in runs.items() if (value := last(history.loss)) is not None}
    yield f"{len(runs)} runs side by side."
    if len(ends) > 1:
        order = sorted(ends, key=lambda name: ends[name])
        low, high = number(ends[order[0]]), number(ends[order[-1]])
        if low == high:
            yield f"The losses at the end are equal, {low}."
        else:
            yield f"The lowest loss at the end is that of {order[0]}, {low}; the highest that of"
            yield f"{order[-1]}, {high}."
        if len({history.last_step for history in runs.values()}) > 1:
            yield "The runs have different numbers of steps."


def _table(runs: Runs) -> Table:
    rows = []
    for name, history in runs.items():
        urgencies = [piece.urgency for piece in advise(history)]
        quality, lost = (last(history.series("update", key)) for key in ("descent_quality", "lost"))
        rms = history.series("update", "rms").finite.values
        rows.append(
            [
                name,
                str(history.header.get("optimizer", MISSING)),
                f"{history.last_step:,}",
                number(last(history.loss)),
                number(None if quality is None else 100 * quality),
                number(None if lost is None else 100 * lost),
                number(float(rms.max()) if len(rms) else None),
                f"{len(find_precursors(history).loss):,}",
                f"{len(history.alarms):,}",
                str(urgencies.count("change")),
            ]
        )
    columns = ["Run", "Optimizer", "Steps", "Loss", "EDQ %", "Lost updates %", "Highest RMS_t", "Loss spikes",
               "Alarms", "To change"]  # fmt: skip
    return Table(columns, rows, "Loss, EDQ and lost updates are medians of the last tenth of a run.")
