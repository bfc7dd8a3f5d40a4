"""Figures 1 and 2 of the SwitchBack paper measured anew: accuracy, loss and feature magnitudes."""

from __future__ import annotations

import math
import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from narrowgauge.cli._charts import INK, PALETTE
from studies.clip_precision.page import Results, places, runs_of
from studies.clip_precision.rows import ADDED, NOTHING, REFERENCE, TENSORWISE

COLOURS = {name: light for name, (light, _) in PALETTE.items()}
# Row: colour and dashes; what should lie upon bf16 is told apart by dashes, not by colour alone.
LOOKS = {
    REFERENCE: (INK, ()),
    "SwitchBack int8": (COLOURS["series-2"], (6, 2)),
    "SwitchBack float8": (COLOURS["series-3"], (2, 1.5)),
    "LLM.int8()": (COLOURS["series-1"], ()),
    TENSORWISE: (COLOURS["series-4"], ()),
    "SwitchBackM int8": (COLOURS["series-5"], (8, 2, 1.5, 2)),
    "SwitchBackQ int8": (COLOURS["series-6"], (4, 1.5)),
}
ADDITIONS = dict(zip((added.name for added in ADDED), ((), (6, 2), (2, 1.5), (8, 2, 1.5, 2)), strict=True))


def progress(results: Results) -> Figure:
    """Accuracy of every row against steps; how they end; loss and magnitudes with what is added."""
    place = places(results)[0]
    figure = Figure((13, 8.6), layout="constrained", facecolor="white")
    (accuracy, ends), (loss, blocks) = figure.subplots(2, 2)
    _accuracy(accuracy, results, place)
    _ends(ends, results, place)
    _losses(loss, results, place)
    _blocks(blocks, results, place)
    figure.suptitle(f"{place[0]}, learning rate {place[1]:g}", color=INK)
    return figure


def _style(row: str, **others: Any) -> dict[str, Any]:
    colour, dashes = LOOKS[row]
    return {"color": colour, "linestyle": (0, dashes) if dashes else "-", "linewidth": 1.8, **others}


def _accuracy(axis: Any, results: Results, place: tuple[str, float]) -> None:
    for name in LOOKS:
        runs = [run for run in runs_of(results, place, name, NOTHING) if run["validation_loss"] is not None]
        if runs:
            steps = runs[0]["validations"]["step"]
            values = zip(*(run["validations"]["zero_shot_top1"] for run in runs), strict=True)
            axis.plot(steps, [100 * statistics.fmean(v) for v in values], **_style(name, label=name))
    axis.set(xlabel="step", ylim=(0, None))
    axis.set_title("zero-shot accuracy, %, nothing added, mean of the seeds", color=INK)
    axis.legend(frameon=False, loc="upper left", handlelength=2.6)


def _ends(axis: Any, results: Results, place: tuple[str, float]) -> None:
    """A dot a run."""
    names = [name for name in LOOKS if any(runs_of(results, place, name, added.name) for added in ADDED)]
    lost = False
    for offset, added in zip((-0.27, -0.09, 0.09, 0.27), ADDED, strict=True):
        for at, name in enumerate(names):
            for run in runs_of(results, place, name, added.name):
                good = run["diverged"] is None
                lost = lost or not good
                value = 100 * (run["accuracy"] or 0.0)
                axis.plot(
                    [at + offset], [value], marker="o" if good else "x", markersize=5, linestyle="none",
                    color=LOOKS[name][0],
                )  # fmt: skip
    axis.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=8)
    axis.set(xlim=(-0.5, len(names) - 0.5))
    axis.set_ylim(bottom=0)
    dots = ", ".join(added.name for added in ADDED)
    axis.set_title(f"at the end; left to right: {dots}" + ("; × diverged" if lost else ""), color=INK, fontsize=10)


def _losses(axis: Any, results: Results, place: tuple[str, float]) -> None:
    """Training loss of bf16 and float8, with what is added."""
    for added in ADDED:
        for name in (REFERENCE, TENSORWISE):
            runs = runs_of(results, place, name, added.name)
            if not runs:
                continue
            steps, values = zip(*runs[0]["curve"], strict=True)
            values = [math.nan if value is None else value for value in values]
            dashes = ADDITIONS[added.name]
            style = {"color": LOOKS[name][0], "linewidth": 1.4, "linestyle": (0, dashes) if dashes else "-"}
            axis.plot(steps, values, **style, label=f"{name}, {added.name}")
    axis.set_xlabel("step")
    axis.set_title("training loss, seed 0", color=INK)
    axis.legend(frameon=False, loc="upper right", handlelength=2.6, fontsize=8)


def _blocks(axis: Any, results: Results, place: tuple[str, float]) -> None:
    """E|x_k| against the block, bf16: at the start thin, at the end thick."""
    for number, added in enumerate(ADDED, start=1):
        runs = runs_of(results, place, REFERENCE, added.name)
        if not runs:
            continue
        for when, width in ((0, 1.0), (-1, 2.2)):
            values = runs[0]["magnitudes"]["mean"][when]
            dashes = ADDITIONS[added.name] if when else (1, 1.5)
            axis.plot(
                range(1, len(values) + 1), values, linewidth=width, color=COLOURS[f"series-{number}"],
                linestyle=(0, dashes) if dashes else "-", marker="o", markersize=2 * width,
                label=f"{added.name}, {'end' if when else 'start'}",
            )  # fmt: skip
    axis.set(xlabel="block of the image tower", ylim=(0, None))
    axis.set_title("E|x|, the mean magnitude of what a block gives: bf16, seed 0", color=INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, loc="best", handlelength=2.6, fontsize=8, ncols=2)


PICTURES = {"": progress}
