"""Figures of quantized states: what their codes cost the update, and which codes are used."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from narrowgauge.cli._charts import INK, drawing, new_figure, to_svg
from narrowgauge.cli._report._figure import FIRST, ROWS, SECOND, THIRD, Figure, Table, late_median, number
from narrowgauge.cli._report._heat_maps import code_map, logarithmic
from narrowgauge.gauges._history import Floats, History

# How many of the worst pairs of codes the table has, and which share of those used count as the worst.
WORST, WORST_SHARE = 10, 0.05


def maps(history: History) -> Figure | str:
    """Usage and error of Adam's update by the codes of its two moments."""
    found = history.maps.get("") or next(iter(history.maps.values()), None)
    if found is None or not found[0].any():
        return "No errors of Adam's update by code were recorded: the maps of 256 by 256 codes are left out."
    use, error = found
    used = use > 0
    mean = np.divide(error, use, out=np.zeros_like(error), where=used)
    with drawing():
        drawn = new_figure(270)
        left, right = drawn.subplots(1, 2)
        code_map(left, use, "use")
        code_map(right, mean, "mean relative error")
        left.set_ylabel("code of m")
        picture = Markup(to_svg(drawn, "maps", "Use and error of Adam's update by the codes of its moments"))
    worst = used & (mean >= np.quantile(mean[used], 1 - WORST_SHARE))
    overlap = number(float(100 * use[worst].sum() / use.sum()))
    caption = (
        "How often each pair of codes stands for an update (left), and how far it is from the exact one "
        "(right), on a logarithmic scale of five decades. Good codes have their errors where few updates "
        f"are: {overlap} % of the updates fall into the worst twentieth of the {int(used.sum()):,} pairs "
        "used. 8-bit Optimizers, Appendix D and Figure 4."
    )
    order = np.argsort(-np.where(used, mean, -1.0), axis=None, kind="stable")[:WORST]
    rows = []
    for i, j in zip(*np.unravel_index(order, use.shape), strict=True):
        if used[i, j]:
            rows.append([f"{i} and {j}", number(float(use[i, j])), number(float(mean[i, j]))])
    table = Table(["Codes of m and v", "Updates", "Mean relative error"], rows, "The worst pairs.")
    return Figure("Quantization maps", picture, caption, [table])


def usage(history: History) -> Figure | str:
    """How often each code of the quantized states was used."""
    totals = _by_slot(history)
    if not totals:
        return "No codes of quantized states were recorded: their use is left out."
    looks = dict(zip(totals, (FIRST, SECOND, THIRD) * len(totals), strict=False))
    with drawing():
        drawn = new_figure(260)
        axis = drawn.subplots()
        for label, counts in totals.items():
            share = 100 * counts / counts.sum()
            axis.step(np.arange(len(share)), np.where(share > 0, share, np.nan), where="mid", **looks[label].line)
        logarithmic(axis)
        axis.set_title("use of each code, %", color=INK)
        axis.set_xlabel("code")
        picture = Markup(to_svg(drawn, "usage", "How often each code is used"))
    caption = (
        "All tensors and all measured steps together. Codes that are never used are bits that are paid for "
        "and carry nothing; one that takes most elements says that they differ by less than a code. 8-bit "
        "Optimizers, Appendix D."
    )
    return Figure("Use of codes", picture, caption, [_use_table(totals), _error_table(history)], looks)


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
        rows.append(
            [
                label,
                number(float(counts.sum())),
                str(int((counts > 0).sum())),
                number(entropy),
                f"{most} ({number(float(100 * share[most]))} %)",
            ]
        )
    return Table(["Moment", "Elements", "Codes used", "Bits of information", "Most used code"], rows)


def _error_table(history: History) -> Table:
    names = history.names("state")
    fields = ("relative_norm", "mean_absolute", "flushed")
    rows = [[name, *(number(late_median(history, "state", name, f)) for f in fields)] for name in names[:ROWS]]
    remark = f"The first {ROWS} of {len(names):,}." if len(names) > ROWS else ""
    return Table(["State", "Relative error", "Mean absolute error", "Share rounded to zero"], rows, remark)
