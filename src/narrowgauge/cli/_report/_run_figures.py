"""The figures of a run, each with its numbers as tables, or a sentence on what was not recorded.

A table of steps is thinned to `STEPS` rows; one of tensors has as many as a heat map, and says how many there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from narrowgauge.cli._charts import INK, MUTED, SERIES, LineStyle, page_figure, thin
from narrowgauge.cli._report._page import Figure, Table, number
from narrowgauge.cli._report._run_drawing import (
    LARGEST,
    ROWS,
    code_map,
    curve,
    drawable,
    grid,
    heat_map,
    logarithmic,
    settle,
    short,
    table_map,
)
from narrowgauge.gauges._history import Floats, History, Series
from narrowgauge.gauges._rules import FEATURE_GROWTH
from narrowgauge.gauges._spike_matching import (
    LOSS_DEVIATIONS,
    LOSS_WINDOW,
    REACH,
    RMS_THRESHOLD,
    Precursors,
    find_precursors,
)

FIRST, SECOND, THIRD = (LineStyle(SERIES[i], dashes, 1.8) for i, dashes in enumerate(((), (6, 2), (2, 1.5))))
PLAIN = LineStyle("ink", (), 2.0)
STEPS = 40
# How many of the worst pairs of codes the table has, and which share of those used count as the worst.
WORST, WORST_SHARE = 10, 0.05


def loss(history: History) -> Figure | str:
    """The loss with its spikes, and RMS_t of an embedding and of a middle layer below it."""
    losses = history.loss
    embedding, middle = embedding_and_middle(history)
    lines = {
        f"RMS_t of {name}": (history.series("update", "rms", name), look)
        for name, look in ((embedding, FIRST), (middle, SECOND))
        if name
    }
    panels = bool(len(losses.steps)) + bool(lines)
    if not panels:
        return "No loss and no RMS_t was recorded: the loss, its spikes and their precursors are left out."
    spikes = find_precursors(history)
    with page_figure(
        "loss", "Training loss with its spikes, and RMS_t", 300 * panels, panels, 1, sharex=True, squeeze=False
    ) as drawn:
        axes = list(drawn.axes[:, 0])
        if len(losses.steps):
            axis = axes.pop(0)
            curve(axis, losses, PLAIN, smoothed=True)
            values = dict(zip(losses.steps.tolist(), losses.values.tolist(), strict=True))
            for followed, look in ((True, FIRST), (False, LineStyle(SERIES[3], (), 1))):
                steps = [s for s in spikes.loss if (s in spikes.matched) == followed and abs(values[s]) <= LARGEST]
                axis.plot(
                    steps, [values[s] for s in steps], "v", color=look.color, markersize=9, zorder=5,
                    markerfacecolor=look.color if followed else "none",
                )  # fmt: skip
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
    caption = (
        "Above, the training loss, strong as a running median and faint as measured. A triangle marks a "
        f"loss spike (two losses within ten steps {LOSS_DEVIATIONS:g} standard deviations above the running "
        f"mean); it is filled if an RMS spike came 1 to {REACH} steps before, which then is an upright line. "
        f"Below, RMS_t: near 1 while the second moment follows the gradient, a spike from {RMS_THRESHOLD:g} "
        "on (dotted). SwitchBack, Section 3.4, Appendix E."
    )
    if any(not np.isfinite(series.values).all() for series in (losses, *(s for s, _ in lines.values()))):
        caption += " A purple cross is a value that is not finite."
    if not lines:
        caption += " RMS_t was not recorded: precursors of spikes are left out."
    if not len(losses.steps):
        caption += " The loss was not recorded. Where the model does not return it, give it to Watch.loss before "
        caption += "each step."
    elif not spikes.loss:
        caption += (
            f" No loss spike was found from step {spikes.judged.start:,} on."
            if spikes.judged
            else f" No loss was judged yet: that takes {LOSS_WINDOW} losses before it, and the start is left out."
        )
    shown = {"loss": losses} if len(losses.steps) else {}
    shown |= {name: series for name, (series, _) in lines.items()}
    legend = {"training loss": PLAIN} if len(losses.steps) else {}
    legend |= {name: look for name, (_, look) in lines.items()}
    return Figure("Loss, its spikes, and RMS", drawn.svg, caption, _loss_tables(shown, spikes), legend)


def embedding_and_middle(history: History) -> tuple[str | None, str | None]:
    """The two tensors whose RMS_t the paper compares: an embedding, and a matrix from the middle of the model.

    Of several embeddings the one that foretold most loss spikes, else the one whose RMS_t went highest.
    """
    names = [name for name in history.names("update") if len(history.series("update", "rms", name).finite.steps)]
    shapes = history.parameters
    matrices = [name for name in names if len(shapes.get(name) or []) >= 2] or names
    embeddings = [name for name in matrices if history.is_embedding(name)]
    rest = [name for name in matrices if name not in embeddings]
    inside = [name for name in rest if re.search(r"\.\d+\.", name)] or rest
    foretold = [name for name, _ in find_precursors(history).matched.values()]

    def rank(name: str) -> tuple[int, float]:
        values = history.series("update", "rms", name).since(history.settled).finite.values
        return foretold.count(name), float(np.max(values, initial=0.0))

    first = max(embeddings, key=rank) if embeddings else None
    return first, inside[len(inside) // 2] if inside else None


def _loss_tables(columns: dict[str, Series], spikes: Precursors) -> list[Table]:
    """The curves at some steps, and the spikes of the loss."""
    steps = np.unique(np.concatenate([series.steps for series in columns.values()]))
    kept = steps[thin(len(steps), STEPS)]
    at = {name: dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for name, s in columns.items()}
    rows = [[f"{step:,}", *(number(values.get(step)) for values in at.values())] for step in kept.tolist()]
    remark = f"{len(kept)} of {len(steps):,} steps." if len(kept) < len(steps) else ""
    tables = [Table(["Step", *columns], rows, remark)]
    marked = []
    for step in spikes.loss[:STEPS]:
        name, before = spikes.matched.get(step) or spikes.within.get(step) or ("", 0)
        marked.append([f"{step:,}", number(at["loss"][step]), f"{name} at step {before:,}" if name else "none"])
    if marked:
        more = len(spikes.loss) - len(marked)
        remark = f"{more:,} more loss spikes are left out." if more else ""
        tables.append(Table(["Loss spike at step", "Loss", "RMS spike before or within"], marked, remark))
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
    if max(cells.shared) > 1:
        caption += f" A cell is the worst of up to {cells.shared[0]:,} measured steps"
        caption += f" and {cells.shared[1]} neighboring tensors." if cells.shared[1] > 1 else "."
    if cells.broken.any():
        caption += " Purple: not finite."
    names = history.names("update")
    each = {"the whole model": history.series("update", key)}
    each |= {tensor: history.series("update", key, tensor) for tensor in names[:ROWS]}
    rows = [[what, *_span(series, scale[1])] for what, series in each.items() if len(series.steps)]
    table = Table(["Tensor", "First", "Median", "Worst", "Last"], rows, _first_of(names, " tensors"))
    return Figure(title, heat_map(name, f"{title}, by layer", cells, *scale), caption, [table])


def _span(series: Series, target: float) -> list[str]:
    """First, median, worst (with its step) and last value of a series, as cells."""
    values, finite = series.values, series.finite
    broken = np.flatnonzero(~np.isfinite(values))
    worst = int(broken[0]) if len(broken) else int(np.argmax(np.abs(values - target)))
    middle = float(np.median(finite.values)) if len(finite.values) else math.nan
    at = f"{number(float(values[worst]))} (step {int(series.steps[worst]):,})"
    return [number(float(values[0])), number(middle), at, number(float(values[-1]))]


def _first_of(names: Sequence[str], what: str = "") -> str:
    """What a table leaves out that has a row for each of the first `ROWS`."""
    return f"The first {ROWS} of {len(names):,}{what}." if len(names) > ROWS else ""


def late_median(history: History, kind: str, name: str, key: str) -> float:
    """Of the later half of a run."""
    values = history.series(kind, key, name).finite.values
    return float(np.median(values[len(values) // 2 :])) if len(values) else math.nan


def formats(kind: str, title: str) -> Callable[[History], Figure | str]:
    """A maker of the figure of what tensors of a kind would lose in narrower formats."""

    def make(history: History) -> Figure | str:
        names = history.names(kind)
        known = {f.split(".")[1] for name in names for f in history.fields(kind, name) if f.startswith("formats.")}
        if not known:
            return f"No shares by format were recorded of {title}: what they would lose is left out."
        columns = [(form, loss) for loss in ("underflow", "overflow") for form in sorted(known)]
        fields = [f"formats.{form}.{loss}" for form, loss in columns]
        values = np.array([[late_median(history, kind, name, f) for f in fields] for name in names])
        used = [i for i, (_, loss) in enumerate(columns)
                if loss == "underflow" or np.nan_to_num(values[:, i]).any()]  # fmt: skip
        labels = [f"{columns[i][0]} {'↓' if columns[i][1] == 'underflow' else '↑'}" for i in used]
        shown = values[:ROWS, used]
        svg = table_map(f"formats-{kind}", f"shares lost of {title}", names[:ROWS], labels, shown)
        rows = [[name, *(number(100 * float(v)) if np.isfinite(v) else "—" for v in row)]
                for name, row in zip(names, shown, strict=False)]  # fmt: skip
        table = Table(["Tensor", *(f"{' '.join(columns[i])}, %" for i in used)], rows, _first_of(names))
        caption = (
            f"What if {title} were kept in these formats: the median share over the later half of the run of "
            "elements that would round to zero (↓) or lie beyond the largest number (↑). Orange: all of "
            f"them. {table.remark}"
        )
        return Figure(f"Narrower formats: {title}", svg, caption.rstrip(), [table])

    return make


def features(history: History) -> Figure | str:
    """Feature magnitudes by depth, at the first measured step and at the last."""
    groups = history.blocks()
    names = next(iter(groups.values()), history.names("activation"))
    measured = {name: series for name in names if len((series := history.series("activation", "mean", name)).steps)}
    if not measured:
        return "No activations were recorded: feature magnitudes by depth are left out."
    first, last = (np.array([series.values[end] for series in measured.values()]) for end in (0, -1))
    depth = np.arange(len(measured))
    with page_figure("features", "Feature magnitudes by depth", 300) as drawn:
        axis = drawn.axes
        for values, look in ((first, SECOND), (last, FIRST)):
            axis.plot(depth, drawable(values, positive=True), marker="o", markersize=4, **look.line)
        sound = drawable(np.concatenate([first, last]), positive=True)
        sound = sound[np.isfinite(sound)]
        if len(sound) and sound.max() > 30 * sound.min():
            logarithmic(axis)
        axis.set_title("E|x|", color=INK)
        axis.set_xlabel("depth")
        every = max(1, int(np.ceil(len(measured) / 6)))
        axis.set_xticks(depth[::every], [label[-12:] for label in short(list(measured))[::every]])
    rows = []
    for name, a, b in zip(measured, first, last, strict=True):
        largest = history.series("activation", "absmax", name).values[-1:].tolist()
        rows.append([name, number(float(a)), number(float(b)), *map(number, largest or [None])])
    pattern = next(iter(groups), None)
    what = f"the outputs of {pattern} (# is the block)" if pattern else "the modules that were watched, in order"
    caption = (
        f"Mean absolute value of {what}. Where it grows with depth by {FEATURE_GROWTH:g} and more, float8 "
        "with one scale a tensor is at risk (SwitchBack, Section 2.3 and Figure 2)."
    )
    steps = next(iter(measured.values())).steps
    legend = {f"first measured, step {int(steps[0]):,}": SECOND, f"last, step {int(steps[-1]):,}": FIRST}
    table = Table(["Module", "E|x| first", "E|x| last", "Largest last"], rows)
    return Figure("Feature magnitudes by depth", drawn.svg, caption, [table], legend)


def loss_scale(history: History) -> Figure | str:
    """The loss scale over the steps, and the steps that were skipped."""
    series = history.series("step", "loss_scale")
    if not len(series.steps):
        return "No loss scale was recorded: its history is left out."
    skipped = history.series("step", "skipped").finite
    at = skipped.steps[1:][skipped.values[1:] > skipped.values[:-1]]
    changes = np.flatnonzero(series.values[1:] != series.values[:-1]) + 1
    kept = np.unique(np.concatenate([[0], changes, [len(series.steps) - 1]]))
    with page_figure("scale", "Loss scale over the steps", 240) as drawn:
        axis = drawn.axes
        axis.step(series.steps[kept], drawable(series.values[kept], positive=True), where="post", **PLAIN.line)
        logarithmic(axis, base=2)
        if len(at):
            marks, across = at[thin(len(at), 200)], axis.get_xaxis_transform()
            axis.plot(marks, [0.02] * len(marks), "|", color=FIRST.color, markersize=9, transform=across)
        axis.set_title("loss scale", color=INK)
        axis.set_xlabel("step")
    rows = [[f"{int(series.steps[i]):,}", number(float(series.values[i]))] for i in kept[:STEPS]]
    remark = f"The first {len(rows)} of {len(kept):,} changes." if len(rows) < len(kept) else ""
    caption = (
        f"The factor that gradients are scaled by; {len(changes):,} changes. A tick below is a step that was "
        f"skipped for inf or NaN ({len(at):,}). SwitchBack, Section 2.1 and Appendix G."
    )
    return Figure("Loss scale", drawn.svg, caption, [Table(["Step", "Loss scale"], rows, remark)])


def maps(history: History) -> Figure | str:
    """Usage and error of Adam's update by the codes of its two moments."""
    found = history.maps.get("") or next(iter(history.maps.values()), None)
    if found is None or not found[0].any():
        return "No errors of Adam's update by code were recorded: the maps of 256 by 256 codes are left out."
    use, error = found
    used = use > 0
    mean = np.divide(error, use, out=np.zeros_like(error), where=used)
    with page_figure("maps", "Use and error of Adam's update by the codes of its moments", 270, 1, 2) as drawn:
        left, right = drawn.axes
        code_map(left, use, "use")
        code_map(right, mean, "mean relative error")
        left.set_ylabel("code of m")
    worst = used & (mean >= np.quantile(mean[used], 1 - WORST_SHARE))
    overlap = number(float(100 * use[worst].sum() / use.sum()))
    caption = (
        "How often each pair of codes stands for an update (left), and how far it is from the exact one "
        "(right), on a logarithmic scale of five decades. Good codes have their errors where few updates "
        f"are: {overlap} % of the updates fall into the worst twentieth of the {int(used.sum()):,} pairs "
        "used. 8-bit Optimizers, Appendix D and Figure 4."
    )
    order = np.argsort(-np.where(used, mean, -1.0), axis=None, kind="stable")[:WORST]
    pairs = zip(*np.unravel_index(order, use.shape), strict=True)
    rows = [[f"{i} and {j}", number(float(use[i, j])), number(float(mean[i, j]))] for i, j in pairs if used[i, j]]
    table = Table(["Codes of m and v", "Updates", "Mean relative error"], rows, "The worst pairs.")
    return Figure("Quantization maps", drawn.svg, caption, [table])


def usage(history: History) -> Figure | str:
    """How often each code of the quantized states was used."""
    totals = _by_slot(history)
    if not totals:
        return "No codes of quantized states were recorded: their use is left out."
    looks = dict(zip(totals, (FIRST, SECOND, THIRD) * len(totals), strict=False))
    with page_figure("usage", "How often each code is used", 260) as drawn:
        axis = drawn.axes
        for label, counts in totals.items():
            share = 100 * counts / counts.sum()
            axis.step(np.arange(len(share)), np.where(share > 0, share, np.nan), where="mid", **looks[label].line)
        logarithmic(axis)
        axis.set_title("use of each code, %", color=INK)
        axis.set_xlabel("code")
    caption = (
        "All tensors and all measured steps together. Codes that are never used are bits that are paid for "
        "and carry nothing; one that takes most elements says that they differ by less than a code. 8-bit "
        "Optimizers, Appendix D."
    )
    return Figure("Use of codes", drawn.svg, caption, [_use_table(totals), _error_table(history)], looks)


def _by_slot(history: History) -> dict[str, Floats]:
    """Counts of codes of all tensors whose slot is kept in the same format."""
    totals: dict[str, Floats] = {}
    for (name, slot), counts in history.usage.items():
        label = f"{slot} ({history.state_formats[name, slot]}, {len(counts)} codes)"
        if counts.sum() > 0:
            totals[label] = totals.get(label, np.zeros(len(counts))) + counts
    return totals


def _use_table(totals: dict[str, Floats]) -> Table:
    rows = []
    for label, counts in totals.items():
        share = counts / counts.sum()
        entropy = float(-(share[share > 0] * np.log2(share[share > 0])).sum())
        most = int(share.argmax())
        often = f"{most} ({number(float(100 * share[most]))} %)"
        rows.append([label, number(float(counts.sum())), str(int((counts > 0).sum())), number(entropy), often])
    return Table(["Moment", "Elements", "Codes used", "Bits of information", "Most used code"], rows)


def _error_table(history: History) -> Table:
    names = history.names("state")
    fields = ("relative_norm", "mean_absolute", "flushed")
    rows = [[name, *(number(late_median(history, "state", name, f)) for f in fields)] for name in names[:ROWS]]
    columns = ["State", "Relative error", "Mean absolute error", "Share rounded to zero"]
    return Table(columns, rows, _first_of(names))
