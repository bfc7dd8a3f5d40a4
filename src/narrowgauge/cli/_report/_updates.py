"""Figures of updates: the loss with its spikes and their precursors, and what of the updates arrives."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from narrowgauge.cli._charts import MUTED, SERIES, LineStyle, drawing, new_figure, thin, to_svg
from narrowgauge.cli._report._figure import (
    FIRST,
    PLAIN,
    ROWS,
    SECOND,
    STEPS,
    Figure,
    Table,
    embedding_and_middle,
    grid,
    number,
    span,
)
from narrowgauge.cli._report._heat_maps import LARGEST, curve, drawable, heat_map, logarithmic, settle
from narrowgauge.gauges._history import History, Series
from narrowgauge.gauges._spike_matching import LOSS_DEVIATIONS, LOSS_WINDOW, REACH, RMS_THRESHOLD, find_precursors


def loss(history: History) -> Figure | str:
    """The loss with its spikes, and RMS_t of an embedding and of a middle layer below it."""
    embedding, middle = embedding_and_middle(history)
    lines = {f"RMS_t of {name}": (history.series("update", "rms", name), look)
             for name, look in ((embedding, FIRST), (middle, SECOND)) if name}  # fmt: skip
    if not len(history.loss.steps) and not lines:
        return "No loss and no RMS_t was recorded: the loss, its spikes and their precursors are left out."
    spikes = find_precursors(history)
    with drawing():
        panels = bool(len(history.loss.steps)) + bool(lines)
        drawn = new_figure(300 * panels)
        axes = list(drawn.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
        if len(history.loss.steps):
            axis = axes.pop(0)
            curve(axis, history.loss, PLAIN, smoothed=True)
            values = dict(zip(history.loss.steps.tolist(), history.loss.values.tolist(), strict=True))
            for followed, marker, variable in ((True, "v", SERIES[0]), (False, "v", SERIES[3])):
                steps = [s for s in spikes.loss if (s in spikes.matched) == followed and abs(values[s]) <= LARGEST]
                color = LineStyle(variable, (), 1).color
                face = color if followed else "none"
                axis.plot(steps, [values[s] for s in steps], marker, color=color, markerfacecolor=face,
                          markersize=9, zorder=5)  # fmt: skip
            for _, before in spikes.matched.values():
                axis.axvline(before, color=FIRST.color, linewidth=1, alpha=0.5)
            settle(axis, "training loss", history.last_step, label=not axes)
        if lines:
            axis = axes.pop(0)
            axis.axhline(RMS_THRESHOLD, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
            for series, look in lines.values():
                # A ratio is not negative, and zero has no place on the scale that large ones ask for.
                curve(axis, Series(series.steps, drawable(series.values, positive=True)), look)
            highest = [float(np.nanmax(drawable(s.values), initial=0.0)) for s, _ in lines.values()]
            if max(highest) > 10 * RMS_THRESHOLD:
                logarithmic(axis)
            settle(axis, "RMS_t", history.last_step)
        picture = Markup(to_svg(drawn, "loss", "Training loss with its spikes, and RMS_t"))
    caption = (
        "Above, the training loss, strong as a running median and faint as measured. A triangle marks a "
        f"loss spike (two losses within ten steps {LOSS_DEVIATIONS:g} standard deviations above the running "
        f"mean); it is filled if an RMS spike came 1 to {REACH} steps before, which then is an upright line. "
        f"Below, RMS_t: near 1 while the second moment follows the gradient, a spike from {RMS_THRESHOLD:g} "
        "on (dotted). SwitchBack, Section 3.4, Appendix E."
    )
    if any(not np.isfinite(series.values).all() for series in (history.loss, *(s for s, _ in lines.values()))):
        caption += " A purple cross is a value that is not finite."
    if not lines:
        caption += " RMS_t was not recorded: precursors of spikes are left out."
    if not len(history.loss.steps):
        caption += " The loss was not recorded."
    if len(history.loss.steps) and not spikes.loss:
        caption += (
            f" No loss spike was found from step {spikes.judged.start:,} on."
            if spikes.judged
            else f" No loss was judged yet: that takes {LOSS_WINDOW} losses before it, and the start is left out."
        )
    legend = {name: look for name, (_, look) in lines.items()}
    if len(history.loss.steps):
        legend = {"training loss": PLAIN, **legend}
    return Figure("Loss, its spikes, and RMS", picture, caption, _loss_tables(history, lines), legend)


def _loss_tables(history: History, lines: dict[str, tuple[Series, LineStyle]]) -> list[Table]:
    columns = {"loss": history.loss} if len(history.loss.steps) else {}
    columns |= {name: series for name, (series, _) in lines.items()}
    steps = np.unique(np.concatenate([series.steps for series in columns.values()]))
    kept = steps[thin(len(steps), STEPS)]
    at = {name: dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for name, s in columns.items()}
    rows = [[f"{step:,}", *(number(values.get(step)) for values in at.values())] for step in kept.tolist()]
    remark = f"{len(kept)} of {len(steps):,} steps." if len(kept) < len(steps) else ""
    tables = [Table(["Step", *columns], rows, remark)]
    spikes = find_precursors(history)
    marked = []
    for step in spikes.loss[:STEPS]:
        name, before = spikes.matched.get(step, ("", 0))
        marked.append([f"{step:,}", number(at["loss"][step]), f"{name} at step {before:,}" if name else "none"])
    if marked:
        more = len(spikes.loss) - len(marked)
        remark = f"{more:,} more loss spikes are left out." if more else ""
        tables.append(Table(["Loss spike at step", "Loss", "RMS spike before"], marked, remark))
    return tables


def quality(history: History) -> Figure | str:
    """Effective descent quality, tensors by steps."""
    return _heat(
        history, "quality", "descent_quality", "Effective descent quality", (0.5, 1.0, 1.5),
        "How far what is stored moved along the intended update, relative to its length (Collage, "
        "Definition 3.3). Pale is 1, to a hundredth: nothing is missing. Orange: part of the update vanished, full "
        "orange half of it or more. Blue: rounding went further than was asked.",
    )  # fmt: skip


def lost(history: History) -> Figure | str:
    """Lost updates, tensors by steps."""
    return _heat(
        history, "lost", "lost", "Lost updates", (0.0, 0.0, 1.0),
        "Share of a tensor's elements for which the intended change is not zero and what is stored does not "
        "change (Collage, Definition 3.2). Pale: none; orange: all.",
    )  # fmt: skip


def _heat(
    history: History, name: str, key: str, title: str, scale: tuple[float, float, float], caption: str
) -> Figure | str:
    cells = grid(history, "update", key, scale[1])
    if cells is None:
        return f"No updates were measured: {title.lower()} by layer is left out."
    picture = Markup(heat_map(name, f"{title}, by layer", cells, *scale))
    if max(cells.shared) > 1:
        caption += f" A cell is the worst of up to {cells.shared[0]:,} measured steps"
        caption += f" and {cells.shared[1]} neighboring tensors." if cells.shared[1] > 1 else "."
    if cells.broken.any():
        caption += " Purple: not finite."
    rows = []
    names = history.names("update")
    whole = history.series("update", key)
    if len(whole.steps):
        rows.append(["the whole model", *span(whole, scale[1])])
    for tensor in names[:ROWS]:
        series = history.series("update", key, tensor)
        if len(series.steps):
            rows.append([tensor, *span(series, scale[1])])
    remark = f"The first {ROWS} of {len(names):,} tensors." if len(names) > ROWS else ""
    return Figure(title, picture, caption, [Table(["Tensor", "First", "Median", "Worst", "Last"], rows, remark)])
