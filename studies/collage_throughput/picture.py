"""Figure 4 of Collage measured anew: peak memory against model size, by option; beside it the optimizer's share."""

from __future__ import annotations

from matplotlib.figure import Figure

from narrowgauge.cli._charts import INK, PALETTE
from studies.collage_throughput.page import GB, Results, found, models
from studies.collage_training.picture import plain_numbers

COLOURS = {name: light for name, (light, _) in PALETTE.items()}
LOOKS = {
    "D": (INK, "o", ()),
    "C": (COLOURS["series-1"], "s", (6, 2)),
    "B": (COLOURS["series-2"], "^", (8, 2, 1.5, 2)),
    "A": (COLOURS["series-4"], "v", (2, 1.5)),
    "adamw8bit-split8": (COLOURS["series-3"], "D", (4, 1.5)),
    "torch fused, fp32": (COLOURS["series-5"], "P", (1, 1.5)),
}


def peaks(results: Results) -> Figure:
    """Peaks measured (filled) and planned (hollow), and the milliseconds of an optimizer step."""
    figure = Figure((13, 5), layout="constrained", facecolor="white")
    memory, step = figure.subplots(1, 2)
    for name, (colour, marker, dashes) in LOOKS.items():
        runs = [run for model in models(results) if (run := found(results, model, name)) is not None]
        fits = [run for run in runs if not run["out_of_memory"]]
        style = {"color": colour, "marker": marker, "markersize": 7, "linestyle": (0, dashes) if dashes else "-"}
        measured = [run for run in fits if run["peak_memory"] is not None]
        memory.plot(
            [_millions(r) for r in measured], [r["peak_memory"] / GB for r in measured], label=name, **style
        )
        planned = [run for run in fits if run["planned"] is not None]
        hollow = {"color": colour, "marker": marker, "markersize": 12, "fillstyle": "none", "linestyle": "none"}
        memory.plot([_millions(r) for r in planned], [r["planned"] / GB for r in planned], **hollow)
        step.plot([_millions(r) for r in fits], [r["optimizer_ms"] for r in fits], label=name, **style)
    memory.set_title("peak memory, GB (hollow: planned)", color=INK)
    step.set_title("optimizer step, ms", color=INK)
    for axis in (memory, step):
        axis.set(xscale="log", yscale="log", xlabel="parameters, millions")
        for one in (axis.xaxis, axis.yaxis):
            plain_numbers(one)
    handles, labels = step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, handlelength=2.6)
    return figure


def _millions(run: Results) -> float:
    return run["parameters"] / 1e6


PICTURES = {"": peaks}
