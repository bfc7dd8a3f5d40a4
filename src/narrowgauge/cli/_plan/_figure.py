"""Plans as a picture: one bar a recipe, stacked by what the bytes hold."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from narrowgauge.cli._drawing import INK, MUTED, PALETTE, SERIES, drawing, printable
from narrowgauge.cli._plan._text import PARTS, of_a_step, size
from narrowgauge.recipes import MemoryPlan

# Hatches beside colours: no share is told by its colour alone.
_GREY = ("buffers", "workspaces")
_HATCHES = ("", "//", "", "..", "", "\\\\", "", "xx", "", "oo")


def picture(plans: Sequence[MemoryPlan], kind: str) -> bytes:
    """A file of the given kind, ``"svg"``, ``"png"`` or ``"pdf"``."""
    with drawing():
        figure = Figure((9.0, 1.9 + 0.62 * len(plans)), layout="constrained", facecolor="white")
        axis = figure.subplots()
        names = [part for part in PARTS if any(one.at_peak.get(part) for one in plans)]
        starts = [0.0] * len(plans)
        for number, part in enumerate(names):
            widths = [one.at_peak.get(part, 0) / 1e9 for one in plans]
            colour = MUTED if part in _GREY else PALETTE[SERIES[number % len(SERIES)]][0]
            look: dict[str, Any] = {"facecolor": colour, "hatch": _HATCHES[number], "edgecolor": "white"}
            axis.barh(range(len(plans)), widths, 0.5, starts, label=part, linewidth=0.5, **look)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        whole = max(starts)
        memory = plans[0].device_memory
        if memory is not None:
            axis.axvline(memory / 1e9, color=INK, linewidth=2)
            axis.annotate(
                f"{size(memory)} GB", (memory / 1e9, 1.0), (4, -12), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED,
            )  # fmt: skip
            whole = max(whole, memory / 1e9)
        for row, end in enumerate(starts):
            axis.annotate(f"{end:.3g}", (end, row), (5, 0), textcoords="offset points", va="center", color=INK)
        axis.set(xlim=(0, 1.12 * whole), ylim=(len(plans) - 0.5, -0.6), xlabel="GB on each GPU")
        axis.set_yticks(range(len(plans)), [printable(one.recipe) for one in plans])
        axis.grid(False, axis="y")
        first = plans[0]
        step = f", {of_a_step(first)}" if of_a_step(first) else ""
        axis.set_title(f"{printable(first.model)}{step}")
        figure.legend(loc="outside lower center", ncols=min(len(names), 5), frameon=False)
        file = io.BytesIO()
        dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
        figure.savefig(file, format=kind, dpi=130, bbox_inches="tight", pad_inches=0.15, metadata=dated)
        return file.getvalue()
