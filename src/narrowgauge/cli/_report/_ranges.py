"""Figures of ranges: features by depth, what narrower formats would lose, the loss scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from markupsafe import Markup

from narrowgauge.cli._charts import INK, drawing, new_figure, thin, to_svg
from narrowgauge.cli._report._figure import (
    FIRST,
    PLAIN,
    ROWS,
    SECOND,
    STEPS,
    Figure,
    Table,
    late_median,
    number,
    short,
)
from narrowgauge.cli._report._heat_maps import drawable, logarithmic, table_map
from narrowgauge.gauges._history import History
from narrowgauge.gauges._rules import FEATURE_GROWTH


def features(history: History) -> Figure | str:
    """Feature magnitudes by depth, at the first measured step and at the last."""
    groups = history.blocks()
    names = next(iter(groups.values()), history.names("activation"))
    names = [name for name in names if len(history.series("activation", "mean", name).steps)]
    if not names:
        return "No activations were recorded: feature magnitudes by depth are left out."
    first, last = (
        np.array([history.series("activation", "mean", name).values[end] for name in names]) for end in (0, -1)
    )
    largest = [history.series("activation", "absmax", name).values[-1:].tolist() for name in names]
    depth = np.arange(len(names))
    with drawing():
        drawn = new_figure(300)
        axis = drawn.subplots()
        for values, look in ((first, SECOND), (last, FIRST)):
            axis.plot(depth, drawable(values, positive=True), marker="o", markersize=4, **look.line)
        sound = drawable(np.concatenate([first, last]), positive=True)
        sound = sound[np.isfinite(sound)]
        if len(sound) and sound.max() > 30 * sound.min():
            logarithmic(axis)
        axis.set_title("E|x|", color=INK)
        axis.set_xlabel("depth")
        every = max(1, int(np.ceil(len(names) / 6)))
        axis.set_xticks(depth[::every], [label[-12:] for label in short(names)[::every]])
        picture = Markup(to_svg(drawn, "features", "Feature magnitudes by depth"))
    rows = [
        [name, number(float(a)), number(float(b)), *map(number, top or [None])]
        for name, a, b, top in zip(names, first, last, largest, strict=True)
    ]
    pattern = next(iter(groups), None)
    what = f"the outputs of {pattern} (# is the block)" if pattern else "the modules that were watched, in order"
    caption = (
        f"Mean absolute value of {what}. Where it grows with depth by {FEATURE_GROWTH:g} and more, float8 "
        "with one scale a tensor is at risk (SwitchBack, Section 2.3 and Figure 2)."
    )
    series = history.series("activation", "mean", names[0])
    legend = {
        f"first measured, step {int(series.steps[0]):,}": SECOND,
        f"last, step {int(series.steps[-1]):,}": FIRST,
    }
    return Figure("Feature magnitudes by depth", picture, caption,
                  [Table(["Module", "E|x| first", "E|x| last", "Largest last"], rows)], legend)  # fmt: skip


def formats(kind: str, title: str) -> Callable[[History], Figure | str]:
    """A maker of the figure of what tensors of a kind would lose in narrower formats."""

    def make(history: History) -> Figure | str:
        names = history.names(kind)
        known = {f.split(".")[1] for name in names for f in history.fields(kind, name) if f.startswith("formats.")}
        if not known:
            return f"No shares by format were recorded of {title}: what they would lose is left out."
        columns = [(form, loss) for loss in ("underflow", "overflow") for form in sorted(known)]
        values = np.array([[late_median(history, kind, name, f"formats.{form}.{loss}") for form, loss in columns]
                           for name in names])  # fmt: skip
        used = [i for i in range(len(columns)) if columns[i][1] == "underflow" or np.nan_to_num(values[:, i]).any()]
        labels = [f"{columns[i][0]} {'↓' if columns[i][1] == 'underflow' else '↑'}" for i in used]
        heads = [f"{columns[i][0]} {columns[i][1]}, %" for i in used]
        shown = values[:ROWS, used]
        picture = Markup(table_map(f"formats-{kind}", f"shares lost of {title}", names[:ROWS], labels, shown))
        rows = [[name, *(number(100 * float(v)) if np.isfinite(v) else "—" for v in row)]
                for name, row in zip(names, shown, strict=False)]  # fmt: skip
        caption = (
            f"What if {title} were kept in these formats: the median share over the later half of the run of "
            "elements that would round to zero (↓) or lie beyond the largest number (↑). Orange: all of "
            "them."
        )
        remark = f"The first {ROWS} of {len(names):,}." if len(names) > ROWS else ""
        if remark:
            caption += f" {remark}"
        return Figure(f"Narrower formats: {title}", picture, caption, [Table(["Tensor", *heads], rows, remark)])

    return make


def loss_scale(history: History) -> Figure | str:
    """The loss scale over the steps, and the steps that were skipped."""
    series = history.series("step", "loss_scale")
    if not len(series.steps):
        return "No loss scale was recorded: its history is left out."
    skipped = history.series("step", "skipped").finite
    at = skipped.steps[1:][skipped.values[1:] > skipped.values[:-1]]
    changes = np.flatnonzero(series.values[1:] != series.values[:-1]) + 1
    kept = np.unique(np.concatenate([[0], changes, [len(series.steps) - 1]]))
    with drawing():
        drawn = new_figure(240)
        axis = drawn.subplots()
        axis.step(series.steps[kept], drawable(series.values[kept], positive=True), where="post", **PLAIN.line)
        logarithmic(axis, base=2)
        if len(at):
            marks = at[thin(len(at), 200)]
            axis.plot(marks, [0.02] * len(marks), "|", color=FIRST.color, markersize=9,
                      transform=axis.get_xaxis_transform())  # fmt: skip
        axis.set_title("loss scale", color=INK)
        axis.set_xlabel("step")
        picture = Markup(to_svg(drawn, "scale", "Loss scale over the steps"))
    shown = kept[:STEPS]
    rows = [[f"{int(series.steps[i]):,}", number(float(series.values[i]))] for i in shown]
    remark = f"The first {len(shown)} of {len(kept):,} changes." if len(shown) < len(kept) else ""
    caption = (
        f"The factor that gradients are scaled by; {len(changes):,} changes. A tick below is a step that was "
        f"skipped for inf or NaN ({len(at):,}). SwitchBack, Section 2.1 and Appendix G."
    )
    return Figure("Loss scale", picture, caption, [Table(["Step", "Loss scale"], rows, remark)])
