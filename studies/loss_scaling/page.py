"""Tables, facts and the picture of fp16 and loss scaling.

Losses are compared with those of the same seed, which has the same weights and batches: a format with fp32, a
spike with the same scaler's run without one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from studies.loss_scaling.look import LOW, NORMAL, SCALES, SMALLEST, below
from studies.loss_scaling.rows import FULL
from studies.shared import pictures, tables
from studies.shared.pictures import COLORS, INK, MUTED, Line
from studies.shared.tables import (
    Results,
    apart,
    left_out,
    machine,
    name_of,
    percent2,
    raised,
    several,
    significant,
    span,
    table,
)  # fmt: skip

FORMATS, REFERENCE, QUIET = "formats", "fp32", "none"
MOMENTS = (("series-6", (1, 1.5)), ("series-2", (2, 1.5)), ("series-3", (6, 2)), ("ink", ()))
SCALERS = (
    Line("dynamic", "series-1"), Line("by tensor", "series-2", (6, 2)), Line("whole step", "series-5", (2, 1.5)),
)  # fmt: skip
SPIKES = ("inf × 20", "large × 20")


def power(of_two: float) -> str:
    """2¹⁶ for 65536, 8 for 8."""
    exponent = math.log2(of_two)
    return f"{of_two:,g}" if 1 <= of_two < 2000 or exponent != round(exponent) else f"2{raised(exponent)}"


def runs_of(results: Results, kind: str, row: str) -> list[Results]:
    """Runs that were made, by seed."""
    return tables.runs_of(results, kind=kind, row=row)


def looks(results: Results) -> list[Results]:
    """What was seen of gradients at the moments, none if that run is missing."""
    return next((run["gradients"] for run in runs_of(results, FORMATS, REFERENCE) if "gradients" in run), [])


def together(kinds: dict[str, Results]) -> Results:
    """The histogram of all kinds together."""
    counts = [sum(column) for column in zip(*(found["counts"] for found in kinds.values()), strict=True)]
    return {"zeros": sum(found["zeros"] for found in kinds.values()), "counts": counts}


def moments(results: Results) -> str:
    """Shares below fp16's powers, moment by moment."""
    return table(
        looks(results),
        ("step", "step"),
        ("gradients of weights, < 2⁻¹⁴", lambda look: below(together(look["weights"]), NORMAL), percent2),
        ("< 2⁻²⁴", lambda look: below(together(look["weights"]), SMALLEST), percent2),
        ("of layers' outputs, < 2⁻¹⁴", lambda look: below(together(look["outputs"]), NORMAL), percent2),
        ("< 2⁻²⁴", lambda look: below(together(look["outputs"]), SMALLEST), percent2),
        ("updates, < 2⁻²⁴", lambda look: below(look["updates"], SMALLEST), percent2),
    )


def kinds(results: Results) -> str:
    """Shares below the smallest number by kind of tensor, at the last moment, for each scale."""
    found = looks(results)
    if not found:
        return ""
    lines = [
        (f"{title}: {kind}", histogram)
        for what, title in (("weights", "gradients of weights"), ("outputs", "of outputs"))
        for kind, histogram in {**found[-1][what], "all": together(found[-1][what])}.items()
    ]
    scales = (
        (f"c = {power(scale)}" if place else "< 2⁻²⁴", _below(SMALLEST - math.log2(scale)), percent2)
        for place, scale in enumerate(SCALES)
    )
    return table(lines, ("", lambda line: line[0]), ("< 2⁻¹⁴", _below(NORMAL), percent2), *scales)


def _below(limit: float) -> Any:
    return lambda line: below(line[1], limit)


def backward(results: Results) -> str:
    """What fp16 makes of a whole gradient, by scale and moment."""

    def of(look: Results, key: str) -> Any:
        return lambda place: look["fp16"][place][key]

    columns = [
        (title, of(look, key), percent2)
        for look in looks(results)
        for title, key in ((f"step {look['step']}: error", "error"), ("vanished", "vanished"), ("inf", "infinite"))
    ]
    return table(range(len(SCALES)), ("c", lambda place: power(SCALES[place])), *columns)


def _with_diverged(text: str, runs: Sequence[Results]) -> str:
    bad = sum(run["diverged"] or run["validation_loss"] is None for run in runs)
    return text + (f" {bad} of {len(runs)} diverged" if bad else "")


def formats(results: Results) -> str:
    """How trainings end in each format."""
    reference = runs_of(results, FORMATS, REFERENCE)
    rows = [(row, runs) for row in results["rows"] if (runs := runs_of(results, FORMATS, row["name"]))]
    return table(
        rows,
        ("", lambda line: f"`{line[0]['name']}`"),
        ("what", lambda line: line[0]["title"]),
        ("validation loss", lambda line: tables.mean_of((run["validation_loss"] for run in line[1]), ".4f")),
        ("− fp32's", lambda line: _with_diverged(
            "" if line[0]["name"] == REFERENCE else several(apart(line[1], reference)), line[1])),
        ("scale at the end", lambda line: ", ".join(
            power(scale) for scale in sorted({run["scales"][-1][1] for run in line[1] if run["scales"]}))),
        ("steps missed", lambda line: statistics.fmean(run["missed"] for run in line[1]), ".3g"),
        words=2,
    )  # fmt: skip


def spikes(results: Results) -> str:
    """What becomes of scale, steps and loss after a spike."""
    rows = [
        (injection, row["name"], runs)
        for injection in results["injections"]
        for row in results["rows"]
        if injection["name"] != QUIET and (runs := runs_of(results, injection["name"], row["name"]))
    ]
    return table(
        rows,
        ("spike", lambda line: line[0]["title"]),
        ("scaler", lambda line: f"`{line[1]}`"),
        ("steps skipped whole", lambda line: span(run["skipped_steps"] for run in line[2])),
        ("updates missed, in steps", lambda line: statistics.fmean(run["missed"] for run in line[2]), ".2f"),
        ("scale", lambda line: " to ".join(dict.fromkeys(map(power, (FULL, lowest(line[2])))))),
        ("good steps until it is back", lambda line: back(results, line[2]), ","),
        ("loss − that without a spike", lambda line: _with_diverged(
            several(apart(line[2], runs_of(results, QUIET, line[1]))), line[2])),
        words=2,
    )  # fmt: skip


def lowest(runs: Sequence[Results]) -> float:
    """The lowest scale of some runs."""
    return min(scale for run in runs for _, scale in run["scales"])


def back(results: Results, runs: Sequence[Results]) -> int:
    """Good steps that take the lowest scale back to where it began: by the rule; runs are too short for it."""
    return round(math.log2(runs[0]["scales"][0][1] / lowest(runs))) * results["training"]["interval"]


def origin(results: Results) -> str:
    """What was run, on what."""
    training, data = results["training"], results["data"]
    notes = left_out(results, lambda run: f"{run['kind']}, {run['row']}")
    return (
        f"`{results['command']}`: {training['model']} of {results['parameters']:,} parameters, {training['steps']} "
        f"steps of {training['batch']} × {training['sequence']:,} tokens of {data['source']} "
        f"({data['train_tokens']:,} tokens), vocabulary {training['vocabulary']:,}; AdamW, learning rate "
        f"{training['lr']:g}, β2 {training['beta2']:g}, weight decay {training['weight_decay']:g}, gradients' norm "
        f"at most {training['clip']:g} but not where there are spikes, which begin at step {training['spiked']}; "
        f"{machine(results)}. {notes}\n"
    )


def facts(results: Results) -> dict[str, str]:
    """Numbers in sentences; a row's name has underscores for what is no letter or digit."""
    training = results["training"]
    named = {"runs": str(len(results["runs"])), "seeds": str(training["seeds"]), "steps": str(training["steps"])}
    named |= {"tokens": f"{training['batch'] * training['sequence']:,}", "spiked": str(training["spiked"])}
    reference = runs_of(results, FORMATS, REFERENCE)
    for row in results["rows"]:
        runs = runs_of(results, FORMATS, row["name"])
        if row["name"] != REFERENCE and (found := apart(runs, reference)):
            named[f"loss_{_name(row['name'])}"] = f"{statistics.fmean(found):+.4f}"
        for injection in results["injections"]:
            runs = runs_of(results, injection["name"], row["name"])
            if not runs:
                continue
            key = f"{_name(row['name'])}_{_name(injection['name'])}"
            named[f"missed_{key}"] = f"{statistics.fmean(run['missed'] for run in runs):.2f}"
            named[f"scale_{key}"] = power(lowest(runs))
            named[f"back_{key}"] = f"{back(results, runs):,}"
            named[f"end_{key}"] = f"{statistics.fmean(run['validation_loss'] for run in runs):.2f}"
            if injection["name"] != QUIET and (change := apart(runs, runs_of(results, QUIET, row["name"]))):
                named[f"loss_{key}"] = f"{statistics.fmean(change):+.4f}"
    losses = [run["validation_loss"] for run in reference if not run["diverged"]]
    named |= {"spread": f"{max(losses) - min(losses):.4f}"} if len(losses) > 1 else {}
    return named | (_of_gradients(looks(results)) if looks(results) else {})


def _of_gradients(found: list[Results]) -> dict[str, str]:
    def shares(what: str, limit: float) -> list[float]:
        return [100 * below(together(look[what]), limit) for look in found]

    def two(share: float) -> str:
        return significant(share, 2)

    named: dict[str, str] = {}
    for what in ("weights", "outputs"):
        named[f"{what}_flushed"] = f"{two(min(shares(what, SMALLEST)))} to {two(max(shares(what, SMALLEST)))} %"
        named[f"{what}_most"] = f"{two(max(shares(what, SMALLEST)))} %"
        named[f"{what}_most_8"] = f"{two(max(shares(what, SMALLEST - 3)))} %"
        named[f"{what}_subnormal"] = f"{two(min(shares(what, NORMAL)))} to {two(max(shares(what, NORMAL)))} %"
    named["attention_most"] = percent2(
        max(below(look["outputs"]["attention"], SMALLEST) for look in found if "attention" in look["outputs"])
    )
    updates = [100 * below(look["updates"], SMALLEST) for look in found]
    named |= {"updates_flushed": f"{two(min(updates))} to {two(max(updates))} %"}
    named |= {"updates_most": f"{two(max(updates))} %"}
    for place, scale in enumerate(SCALES):
        named[f"error_{scale:g}"] = percent2(max(look["fp16"][place]["error"] for look in found))
    return named


def _name(text: str) -> str:
    return name_of(text.replace("×", ""))


def gradients_and_spikes(results: Results) -> Figure:
    """Histograms above; below the loss around the two long spikes, less that of the run without one."""
    figure, (above, under) = pictures.figure(13, 8.4, 2, 2)
    titles = {"weights": "gradients of weights", "outputs": "gradients of layers' outputs"}
    for axis, (what, title) in zip(above, titles.items(), strict=True):
        _histograms(axis, looks(results), what)
        axis.set_title(f"{title}, % of the values by power of two", color=INK)
    for axis, name in zip(under, SPIKES, strict=True):
        _losses(axis, results, name)
        (title,) = [i["title"] for i in results["injections"] if i["name"] == name]
        axis.set_title(f"loss − that without a spike:\n{title}", color=INK)
        axis.set_xlabel("step")
    return figure


def _histograms(axis: Any, found: list[Results], what: str) -> None:
    for look, (color, dashes) in zip(found, MOMENTS, strict=False):
        counts = together(look[what])["counts"]
        total = sum(counts) or 1
        shown = [(k, 100 * count / total) for k, count in enumerate(counts, LOW) if -45 <= k <= 5]
        axis.plot(*zip(*shown, strict=True), label=f"step {look['step']}", **Line("", color, dashes).style())
    axis.axvspan(SMALLEST, NORMAL, color=COLORS["series-5"], alpha=0.12, linewidth=0)
    axis.axvspan(-45, SMALLEST, color=COLORS["series-1"], alpha=0.14, linewidth=0)
    axis.set_xlim(-45, 5)
    top = axis.get_ylim()[1]
    axis.set_ylim(0, 1.12 * top)
    for place, words in ((-44.5, "below fp16's least"), (SMALLEST + 0.4, "subnormal")):
        axis.text(place, 1.03 * top, words, color=MUTED, fontsize=11)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda k, _: power(2.0**k) if k else "1"))
    axis.legend(frameon=False, loc="upper right")


def _losses(axis: Any, results: Results, name: str) -> None:
    for scaler in SCALERS:
        runs = runs_of(results, name, scaler.label)
        lines = [line for run in runs if (line := _above(results, run))]
        if not lines:
            continue
        mean = [statistics.fmean(column) for column in zip(*lines, strict=False)]
        steps = range(runs[0]["around"]["first"], runs[0]["around"]["first"] + len(mean))
        for line in lines:
            axis.plot(steps[: len(line)], line[: len(steps)], color=COLORS[scaler.color], linewidth=0.6, alpha=0.5)
        axis.plot(steps, mean, label=scaler.label, **scaler.style())
    axis.axvline(results["training"]["spiked"], color=MUTED, linewidth=1.0)
    if axis.lines[:-1]:
        axis.legend(
            loc="upper left", borderaxespad=0.0, edgecolor="none", framealpha=0.9, fontsize=12, handlelength=1.8
        )
    axis.margins(x=0.01)


def _above(results: Results, run: Results) -> list[float]:
    """Losses of a run less those of the same run without a spike."""
    quiet = next((r for r in runs_of(results, QUIET, run["row"]) if r["seed"] == run["seed"]), None)
    if quiet is None:
        return []
    pairs = zip(run["around"]["losses"], quiet["around"]["losses"], strict=False)
    return [math.nan if a is None or b is None else a - b for a, b in pairs]


TABLES = {
    "moments": moments, "kinds": kinds, "backward": backward, "formats": formats, "spikes": spikes,
    "origin": origin,
}  # fmt: skip
PICTURES = {"": gradients_and_spikes}
